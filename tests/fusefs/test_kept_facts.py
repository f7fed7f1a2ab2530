"""What is kept of a process: what the allowlist names, and nothing else, whatever is put in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.fusefs.kept_facts import IDS, NUMBERS, PLACES, kept_arguments, kept_cgroup, kept_ids, kept_program

SECRET = "hunter2"
PYTHON = "python3.12"


def line(*words: str) -> bytes:
    return b"".join(word.encode() + b"\0" for word in words)


@pytest.mark.parametrize(
    ("program", "words", "kept"),
    [
        (PYTHON, ["python3", "train.py", "--seed", "7"], ["train.py", "--seed=7"]),
        (PYTHON, ["python3", "-u", "-OO", "/home/ada/src/train.py"], ["train.py"]),
        (PYTHON, ["python3", "-m", "torch.run", "--lr=2"], ["-m torch.run", "--lr=2"]),
        (PYTHON, ["python3", "/bin/torchrun", "--node_rank", "8", "t.py"], ["torchrun", "--node_rank=8"]),
        (PYTHON, ["python3", "t.py", "--config", "conf/a.yaml"], ["t.py", "--config=conf/a.yaml"]),
        (PYTHON, ["python3", "t.py", "--seed", "1", "--seed", "1"], ["t.py", "--seed=1"]),
        (PYTHON, ["python3", "-c", f"print('{SECRET}')", "--seed", "1"], []),
        (PYTHON, ["python3", "-Ic", SECRET], []),
        (PYTHON, ["python3", "-uc", SECRET, SECRET], []),
        (PYTHON, ["python3", "-X", SECRET, "t.py"], []),
        (PYTHON, ["python3", "--check-hash-based-pycs", SECRET, "t.py"], []),
        (PYTHON, ["python3", "-"], []),
        (PYTHON, ["python3"], []),
        (PYTHON, [], []),
        (PYTHON, ["python3", f"a b {SECRET}.py"], []),
        (PYTHON, ["python3", "-m", f"mod;{SECRET}"], []),
        (PYTHON, ["python3", "t.py", "--token", SECRET, f"--password={SECRET}", SECRET], ["t.py"]),
        (PYTHON, ["python3", "t.py", "--seed", SECRET, f"--lr={SECRET}"], ["t.py"]),
        (PYTHON, ["python3", "t.py", "--config", f"https://u:{SECRET}@host/a"], ["t.py"]),
        (PYTHON, ["python3", "t.py", "--config", f"k={SECRET}"], ["t.py"]),
        (PYTHON, ["python3", "t.py", f"--{SECRET}", "--seed"], ["t.py"]),
        ("bash", ["bash", "run.sh", SECRET, "--rank", "3"], ["run.sh", "--rank=3"]),
        ("bash", ["bash", "-c", SECRET], []),
        ("bash", ["bash", "-ec", SECRET, "--seed", "1"], []),
        ("bash", ["bash", "-o", SECRET, "run.sh"], []),
        ("sh", ["sh"], []),
        ("cp", ["cp", SECRET, SECRET], []),
        ("trainer", ["trainer", "--batch-size", "32", SECRET], ["--batch-size=32"]),
        ("", [SECRET, SECRET], []),
    ],
)  # fmt: skip
def test_arguments(program: str, words: list[str], kept: list[str]) -> None:
    assert kept_arguments(program, line(*words)) == tuple(kept)


@given(st.sampled_from([PYTHON, "bash", "cp"]), st.lists(st.text("-=cm/.xsed ", max_size=8), max_size=8))
def test_kept_options_are_on_the_list(program: str, words: list[str]) -> None:
    for one in kept_arguments(program, line(program, *words)):
        if one.startswith("--"):
            assert one[2:].partition("=")[0].replace("_", "-") in NUMBERS | PLACES
        elif one.startswith("-m "):
            assert one[3:] in words
        else:
            assert any(word.rpartition("/")[2] == one for word in words)


@given(st.binary(max_size=200))
def test_any_bytes_are_taken(anything: bytes) -> None:
    kept_arguments(PYTHON, anything)
    kept_cgroup(anything)
    kept_program(anything)
    assert {name for name, _ in kept_ids(anything)} <= IDS


def test_a_command_line_without_an_end() -> None:
    assert len(kept_arguments(PYTHON, line("p", "t.py", *(f"--seed={n}" for n in range(10_000))))) == 32


def test_ids_of_the_environment() -> None:
    environment = line(
        "SLURM_JOB_ID=77", "RANK=0", "POD_NAME=run-0", "HF_TOKEN=hunter2", f"SLURM_JOB_NAME={SECRET}",
        f"POD_NAMESPACE=a {SECRET}", "NODE_NAME", "WORLD_SIZE=", f"XRANK={SECRET}", f"RANK_X={SECRET}",
    )  # fmt: skip
    assert kept_ids(environment) == (("RANK", "0"), ("POD_NAME", "run-0"), ("SLURM_JOB_ID", "77"))
    assert kept_ids(line("RANK=1", "RANK=2")) == (("RANK", "2"),)


@pytest.mark.parametrize(
    ("listing", "cgroup", "container"),
    [
        (
            "0::/user.slice/user-1000.slice/session-3.scope\n",
            "/user.slice/user-1000.slice/session-3.scope",
            "",
        ),
        (f"0::/system.slice/docker-{'a' * 64}.scope\n", f"/system.slice/docker-{'a' * 64}.scope", "a" * 64),
        (f"12:cpu:/kubepods/pod1/{'b' * 64}\n1:name=systemd:/x\n", f"/kubepods/pod1/{'b' * 64}", "b" * 64),
        (f"1:name=systemd:/docker/{'c' * 64}\n0::/\n", "/", "c" * 64),
        (f"0::/{'d' * 65}\n", f"/{'d' * 65}", ""),
        ("0::/a:b\n", "/a:b", ""),
        (f"0::/{'x' * 300}\n", "", ""),
        ("0::/a\x1bb\n", "", ""),
        ("", "", ""),
        ("nonsense\n", "", ""),
    ],
)
def test_cgroups(listing: str, cgroup: str, container: str) -> None:
    assert kept_cgroup(listing.encode()) == (cgroup, container)


@pytest.mark.parametrize(
    ("executable", "program"),
    [
        ("/usr/bin/python3.11", "python3.11"), ("/opt/x/trainer (deleted)", "trainer"), ("", ""),
        ("/a/b c", ""), ("/a/" + "x" * 65, ""),
    ],
)  # fmt: skip
def test_programs(executable: str, program: str) -> None:
    assert kept_program(executable.encode()) == program
