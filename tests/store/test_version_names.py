"""VERSION specs: each means one version or says in one line what to do.

The one rule: what a text means does not depend on which other versions or tags exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.store.errors import InvalidRequest, NotFound
from ckptfs.store.history import State
from ckptfs.store.version_names import (
    check_tag,
    number_in_name,
    resolve,
    split_version,
    step_in_link,
    step_link,
    steps_held,
    version_name,
)

# 2026-11-29T16:02:11.5Z
MOMENT_NS = 1_795_968_131_500_000_000


@dataclass(frozen=True, slots=True)
class Version:
    number: int
    time_ns: int
    state: State = State.COMPLETE
    steps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return version_name(self.number, self.time_ns)


def version(
    number: int, after_s: int = 0, state: State = State.COMPLETE, steps: tuple[int, ...] = ()
) -> Version:
    return Version(number, MOMENT_NS + after_s * 10**9, state, steps)


# 1: step 100. 3: steps 100 and 200. 4: partial. 7: opaque. 42: partial, an hour later.
VERSIONS = (
    version(1, 0, steps=(100,)),
    version(3, 60, steps=(100, 200)),
    version(4, 120, State.PARTIAL, steps=(100, 200, 300)),
    version(7, 180, State.OPAQUE),
    version(42, 3600, State.PARTIAL, steps=(400,)),
)
TAGS = {"best": 3, "v1-draft": 7, "gone": 2}


def number(text: str, versions: Sequence[Version] = VERSIONS, tags: Mapping[str, int] = TAGS) -> int:
    return resolve(text, versions, tags).number


def test_names() -> None:
    assert version_name(42, MOMENT_NS) == "v000042_20261129T160211Z"
    assert version_name(12345678, 0) == "v12345678_19700101T000000Z"
    assert version_name(1, 1 << 64) == "v000001_25540721T233433Z"
    assert version_name(1, 1 << 100) == "v000001_99991231T235959Z"
    assert version_name(1, -5) == "v000001_19700101T000000Z"


@given(st.integers(1, 10**17), st.integers(0, 2**63))
def test_a_name_gives_its_number_and_is_no_tag(number: int, time_ns: int) -> None:
    name = version_name(number, time_ns)
    assert number_in_name(name) == number
    with pytest.raises(InvalidRequest):
        check_tag(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", 42),
        ("v42", 42),
        ("v000042", 42),
        ("000001", 1),
        ("v000003_20261129T160311Z", 3),
        ("latest", 42),
        ("latest-complete", 3),
        ("best", 3),
        ("v1-draft", 7),
        ("step:100", 3),
        ("step-200", 3),
        ("step:0200", 3),
        ("step:240~50", 3),
        ("step:150~50", 3),
        ("step:50~50", 3),
        ("time:2026-11-29T16:02:11", 1),
        ("time:2026-11-29T16:02:11Z", 1),
        ("time:2026-11-29T16:03", 1),
        ("time:2026-11-29T16:04", 3),
        ("time:2026-11-29T17:04:59+01:00", 4),
        ("time:2099-01-01T00:00", 42),
    ],
)
def test_what_a_text_means(text: str, expected: int) -> None:
    assert number(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "the nearest is 4 and 7"),
        ("99", "the nearest is 42"),
        ("v0", "the nearest is 1"),
        ("gone", "no version 2"),
        ("v000042_20261129T160211Z", "number 42 is v000042_20261129T170211Z"),
        ("worst", "tags: best, gone, v1-draft"),
        ("step:300", "the nearest steps are 100, 200"),
        ("step:300~50", "or one within 50"),
        ("step-300", "step 300"),
        ("time:2026-11-29T16:02", "the oldest is v000001"),
        ("", "no version or tag"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(text: str, said: str) -> None:
    with pytest.raises(NotFound, match=re.escape(said)) as caught:
        number(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "step:",
        "step:x",
        "step:1~",
        "step:-1",
        "time:",
        "time:now",
        "time:2026-13-01T00:00",
        "time:2026-11-29",
        "time:2026-11-29T16:00:00+99:99",
        "time:2026-11-29T24:61",
        "time:2026-11-29 16:00",
    ],
)
def test_what_can_never_mean_a_version(text: str) -> None:
    with pytest.raises(InvalidRequest, match="such as"):
        number(text)


@pytest.mark.parametrize(
    "text", ["1", "latest", "latest-complete", "step:1", "step:1~9", "time:2026-11-29T16:00", "t"]
)
def test_without_any_version_everything_is_missing(text: str) -> None:
    with pytest.raises(NotFound):
        number(text, (), {})


def test_without_a_complete_version() -> None:
    with pytest.raises(NotFound, match="the newest is 42"):
        number("latest-complete", VERSIONS[-1:])


def test_a_step_is_held_by_complete_versions_only() -> None:
    assert steps_held(VERSIONS) == {100: 3, 200: 3}
    assert step_in_link(step_link(1000)) == 1000
    for name in ("step-01", "step-", "step-x", "step--1", "step:1", "xstep-1"):
        assert step_in_link(name) is None


@pytest.mark.parametrize(
    "name", ["best", "my run", "3.5B", "été", "v1-final", "step", "latest2", "a" * 255, "v"]
)
def test_good_tags(name: str) -> None:
    check_tag(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "a@b",
        "a\0b",
        "a\nb",
        "a\x1b[2J",
        "\udcff",
        "a" * 256,
        "é" * 128,
        "latest",
        "latest-complete",
        "42",
        "v42",
        "v000042_x",
        "v7_\n",
        "step-5",
        "step:5",
        "time:x",
    ],
)
def test_bad_tags(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_tag(name)


@pytest.mark.parametrize(
    ("text", "path", "spec"),
    [
        ("/mnt/run", "/mnt/run", None),
        ("/mnt/run@42", "/mnt/run", "42"),
        ("run@latest", "run", "latest"),
        ("/mnt/run@time:2026-11-29T16:00", "/mnt/run", "time:2026-11-29T16:00"),
        ("/mnt/me@home/run", "/mnt/me@home/run", None),
        ("/mnt/me@home/run@best", "/mnt/me@home/run", "best"),
        ("@best", "@best", None),
        ("run@", "run", ""),
    ],
)
def test_paths_with_a_version(text: str, path: str, spec: str | None) -> None:
    assert split_version(text) == (path, spec)


@given(st.text())
def test_any_text_means_one_version_or_is_refused_in_one_line(text: str) -> None:
    try:
        found = resolve(text, VERSIONS, TAGS)
    except (NotFound, InvalidRequest) as e:
        assert len(str(e).splitlines()) == 1
    else:
        assert found in VERSIONS


@given(st.text())
def test_a_tag_that_is_accepted_is_found_and_breaks_no_path(name: str) -> None:
    try:
        check_tag(name)
    except InvalidRequest:
        return
    assert number(name, VERSIONS, {name: 4}) == 4
    assert split_version(f"/mnt/run@{name}") == ("/mnt/run", name)
