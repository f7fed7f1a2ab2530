"""What is kept of a process's command line, environment and cgroup. Pure.

One rule: an allowlist decides, never a list of what looks like a secret. What is not named here, or not of
the form that its name allows, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptfs.store.writers import MOST_CHARACTERS

_MOST_WORDS = 4096
_MOST_KEPT = 32
_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,64}")
_MODULE = re.compile(r"[A-Za-z_]\w{0,63}(\.\w{1,64}){0,8}", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,12}(\.\d{1,12})?(e-?\d{1,3})?", re.ASCII)
_PLACE = re.compile(r"[A-Za-z0-9_.+/-]{1,200}")
_ID = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CONTAINER = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
# Options of Python that take nothing behind them; before any other no script is looked for.
_PYTHON_FLAGS = re.compile(r"-[bBdEiIOPqsSuvx]+")

NUMBERS = frozenset({
    "batch-size", "epochs", "learning-rate", "local-rank", "lr", "max-steps", "nnodes", "node-rank",
    "nproc-per-node", "rank", "save-steps", "seed", "world-size",
})  # fmt: skip
"""Options whose value is kept if it is a number."""
PLACES = frozenset({
    "config", "config-file", "config-name", "config-path", "deepspeed-config", "experiment", "recipe",
    "run-name",
})  # fmt: skip
"""Options whose value is kept if it is a name or a path without anything unusual in it."""
IDS = frozenset({
    "HOSTNAME", "JOB_COMPLETION_INDEX", "LOCAL_RANK", "NODE_NAME", "NODE_RANK", "POD_NAME", "POD_NAMESPACE",
    "POD_UID", "RANK", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME", "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID", "WORLD_SIZE",
})  # fmt: skip
"""Names of the environment whose value is kept if it has the form of an id."""


def kept_program(executable: bytes) -> str:
    """The name of an executable, from the path of its file."""
    name = executable.removesuffix(b" (deleted)").rpartition(b"/")[2].decode("utf-8", "replace")
    return name if _NAME.fullmatch(name) else ""


def kept_arguments(program: str, command_line: bytes) -> tuple[str, ...]:
    """The script or module that `program` runs, and the options on the allowlist, as `--option=value`."""
    words = [word.decode("utf-8", "replace") for word in command_line.split(b"\0")[:_MOST_WORDS]][1:]
    script, rest = _script(program, words)
    kept = ((script,) if script else ()) + tuple(dict.fromkeys(_options(rest)))
    return kept[:_MOST_KEPT]


def kept_ids(environment: bytes) -> tuple[tuple[str, str], ...]:
    """Names on the allowlist and their values, in the order of their record."""
    found = {}
    for one in environment.split(b"\0"):
        name, _, value = one.decode("utf-8", "replace").partition("=")
        if name in IDS and _ID.fullmatch(value):
            found[name] = value
    return tuple(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def kept_cgroup(listing: bytes) -> tuple[str, str]:
    """The cgroup in a /proc/PID/cgroup (of version 2, else the first), and the container's id in it."""
    lines = [line.split(":", 2) for line in listing.decode("utf-8", "replace").splitlines()]
    paths = {line[0]: line[2] for line in lines if len(line) == 3}
    path = paths.get("0", next(iter(paths.values()), ""))
    containers = [found for one in (path, *paths.values()) for found in _CONTAINER.findall(one)]
    shown = path if path.isprintable() and len(path) <= MOST_CHARACTERS else ""
    return shown, containers[-1] if containers else ""


def _script(program: str, words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """What an interpreter runs, and the words behind that; of `-c CODE` nothing."""
    if _PYTHON.fullmatch(program) is None:
        is_named = program in _SHELLS and words and words[0][:1] not in ("-", "+")
        return (_base_name(words[0]), words[1:]) if is_named else ("", () if program in _SHELLS else words)
    at = 0
    while at < len(words) and _PYTHON_FLAGS.fullmatch(words[at]):
        at += 1
    if at + 1 < len(words) and words[at] == "-m":
        is_module = _MODULE.fullmatch(words[at + 1]) is not None
        return (f"-m {words[at + 1]}" if is_module else ""), words[at + 2 :]
    if at < len(words) and not words[at].startswith("-"):
        return _base_name(words[at]), words[at + 1 :]
    return "", ()


def _base_name(path: str) -> str:
    name = path.rpartition("/")[2]
    return name if _NAME.fullmatch(name) else ""


def _options(words: Sequence[str]) -> Iterator[str]:
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, given, value = word[2:].partition("=")
        if not given:
            value = words[at + 1] if at + 1 < len(words) else ""
        plain = name.replace("_", "-")
        form = _NUMBER if plain in NUMBERS else _PLACE if plain in PLACES else None
        if form is not None and form.fullmatch(value) and not value.startswith("--"):
            yield f"--{name}={value}"
