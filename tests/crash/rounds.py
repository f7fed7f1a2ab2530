"""The rounds of kill9.py: writers work, the daemon is killed, started again, and everything is checked.

One rule: what must be there is told by the writers' own journals (oracle.py), what is there is looked at
as a client looks (seen.py) and in the store's files (storecheck.py); the daemon is believed nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import kernelmounts
from asking import DAEMON
from livetree import Tree
from moments import Watch, choose_moment
from mounting import Mount
from oracle import Ending, new_tree, replay, settle
from seen import list_versions, look_at_tree, outline_of, tree_digest, version_digest

HERE = Path(__file__).parent
WRITERS = ("run0", "run1", "run2", "run3", "shared/rank0", "shared/rank1", "shared/rank2", "deep/a/b")
SETTLE_S = 0.3
WRITE_PATHS = ("auto", "plain")
LONGEST_S = 3.5
CONFIG = {"settle_s": SETTLE_S, "settle_max_s": 1.5, "min_free": "64MiB", "log_level": "warning"}
_CLIENT_END_S = 15.0
_CHECK_S = 120.0
_OLD_VERSIONS_A_ROUND = 4
_OLD_TAGS_A_ROUND = 1


@dataclass(slots=True)
class RoundResult:
    """What one kill showed."""

    number: int
    moment: str
    write_path: str
    ran_s: float = 0.0
    killed_at_start: bool = False
    calls: int = 0
    pending: int = 0
    fsyncs: int = 0
    files: int = 0
    file_bytes: int = 0
    versions: int = 0
    versions_hashed: int = 0
    tags: int = 0
    restart_s: float = 0.0
    recovery: str = ""
    findings: list[str] = field(default_factory=list)
    is_last: bool = False


class Campaign:
    """The rounds on one store. `logs` keeps journals and the daemon's log."""

    def __init__(
        self, folder: Path, store: Path, seed: str, write_path: str, longest_s: float = LONGEST_S
    ) -> None:
        self.folder, self.store = folder, store
        self._write_path = write_path
        self._longest_s = longest_s
        self._chance = random.Random(seed)
        self._shared_seed = self._chance.getrandbits(40)
        config = {**CONFIG, "write_path": write_path}
        self.mount = Mount(folder / "mnt", store, logs=folder / "logs", config=config, limit_s=600)
        self._trees: dict[str, Tree] = {name: new_tree() for name in WRITERS}
        self._counts = dict.fromkeys(WRITERS, 0)
        self._listed: set[tuple[str, str]] = set()
        self._hashed: dict[tuple[str, str], str] = {}
        self._tags: dict[tuple[str, str], dict[str, str]] = {}
        self._roots: dict[str, dict[int, str]] = {}
        self._round = 0

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Start the daemon on the empty store; everything is gone afterwards, whatever happened."""
        try:
            self.mount.start()
            for name in WRITERS:
                os.makedirs(self.mount.path / name)
            yield
        finally:
            self.mount.clean_up()

    def run_round(self, number: int) -> RoundResult:
        """Work, kill, restart, check."""
        self._round = number
        moment = choose_moment(self._chance, SETTLE_S, self._longest_s)
        result = RoundResult(number, moment.kind, self._write_path)
        result.killed_at_start = self._chance.random() < 0.125
        clients = self._start_clients()
        result.ran_s = Watch(self.store, [self._journal(name) for name in WRITERS]).wait(moment)
        if not self.mount.is_alive():
            result.findings.append(f"the daemon had ended by itself:\n{self.mount.log_tail()}")
        killed_at = time.monotonic()
        self._kill()
        self._end_clients(clients, result)
        kernelmounts.remove(self.mount.path)
        begun = time.monotonic()
        if result.killed_at_start:
            self._kill_while_starting()
        try:
            self.mount.restart()
        except AssertionError as e:
            result.findings.append(f"the store does not open again: {e}")
            result.is_last = True
            return result
        result.restart_s = time.monotonic() - begun
        self._check(result, killed_at)
        return result

    # -- the clients -----------------------------------------------------------------------

    def _journal(self, name: str) -> Path:
        return self.folder / "logs" / f"{self._round:04d}-{name.replace('/', '-')}.journal"

    def _start_clients(self) -> dict[str, subprocess.Popen[bytes]]:
        clients = {}
        for name in WRITERS:
            state = self._journal(name).with_suffix(".state")
            begun = {
                "names": self._trees[name].to_json(),
                "count": self._counts[name],
                "round": self._round,
                "shared_seed": self._shared_seed,
            }
            state.write_text(json.dumps(begun))
            self._journal(name).touch()
            seed = str(self._chance.getrandbits(64))
            arguments = [str(self.mount.path / name), str(self._journal(name)), str(state), seed]
            clients[name] = self._client("writer.py", *arguments, sys.executable, "-m", "ckptfs.daemon")
        seed = str(self._chance.getrandbits(64))
        clients["watcher"] = self._client("watcher.py", str(self.mount.path), str(self._watched()), seed)
        return clients

    def _watched(self) -> Path:
        return self.folder / "logs" / f"{self._round:04d}-watched"

    def _client(self, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self.mount.environment,
        )

    def _end_clients(self, clients: dict[str, subprocess.Popen[bytes]], result: RoundResult) -> None:
        """They end by themselves, because the mount is gone."""
        deadline = time.monotonic() + _CLIENT_END_S
        for name, client in clients.items():
            try:
                _, said = client.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                client.kill()
                _, said = client.communicate(timeout=10)
                result.findings.append(f"{name} hung on the dead mount")
            if client.returncode not in (0, -7):  # 7: SIGBUS, what a mapping of a dead mount gives
                text = said.decode(errors="replace").strip()
                result.findings.append(f"{name} ended with {client.returncode}: {text[-600:]}")

    # -- the kill --------------------------------------------------------------------------

    def _kill(self) -> None:
        if self.mount.is_alive():
            self.mount.kill9()
        else:
            self.mount.clean_up()

    def _kill_while_starting(self) -> None:
        """The restart is killed too, before or just after it is ready."""
        delay_s = self._chance.uniform(0.2, 1.2)
        config = str(self.folder / "logs" / "ckptfs.toml")
        with (self.folder / "logs" / "daemon.stderr").open("ab") as log:
            process = subprocess.Popen(
                [*DAEMON, "mount", str(self.mount.path), "--store", str(self.store), "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=self.mount.environment,
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.kill()
        process.wait(20)
        kernelmounts.remove(self.mount.path)

    # -- the checks ------------------------------------------------------------------------

    def _check(self, result: RoundResult, killed_at: float) -> None:
        store_check = self._start_store_check()
        try:
            self._check_trees(result, killed_at)
            self._check_versions(result)
            self._check_command_line(result)
        finally:
            result.findings += _store_findings(store_check)
        log = self.mount.log_tail(lines=100_000)
        if "Traceback (most recent call last)" in log:
            result.findings.append("the daemon logged a traceback")

    def check_store(self) -> list[str]:
        """What storecheck.py finds."""
        return _store_findings(self._start_store_check())

    def _start_store_check(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(HERE / "storecheck.py"), str(self.store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.mount.environment,
        )

    def digest_everything(self) -> dict[tuple[str, str], str]:
        """(unit, version) → hash, of every version that was ever seen listed."""
        return {one: version_digest(str(self.mount.path), *one) for one in sorted(self._listed)}

    @staticmethod
    def digest_folder(folder: Path) -> str:
        """The same hash of a plain folder."""
        return tree_digest(str(folder))

    def _check_trees(self, result: RoundResult, killed_at: float) -> None:
        for name in WRITERS:
            tree = self._trees[name]
            ending = replay(tree, self._journal(name), killed_at)
            try:
                found = look_at_tree(str(self.mount.path / name))
            except (OSError, AssertionError) as e:
                result.findings.append(f"{name}: {e}")
                continue
            pending = ending.pending or ending.pending_tag
            self._trees[name], findings = settle(tree, ending, found)
            result.findings += [f"{name}: {line} (not answered: {str(pending)[:200]})" for line in findings]
            result.findings += [f"{name}: {line}" for line in ending.findings]
            self._note(name, ending, result)

    def _note(self, name: str, ending: Ending, result: RoundResult) -> None:
        result.calls += ending.calls
        result.pending += ending.pending is not None or ending.pending_tag is not None
        result.fsyncs += ending.synced
        tree = self._trees[name]
        result.files += len(tree.files())
        result.file_bytes += sum(tree.names[path].content.size for path in tree.files())
        self._counts[name] += 10_000
        tags = dict(ending.tags)
        if ending.pending_tag is not None and self._tag_exists(name, ending.pending_tag[0]):
            tags[ending.pending_tag[0]] = ending.pending_tag[1]
        self._tags |= {(name, tag): held for tag, held in tags.items()}
        result.tags += len(tags)
        known = sorted(tag for writer, tag in self._tags if writer == name)
        for tag in {*tags, *self._chance.sample(known, k=min(_OLD_TAGS_A_ROUND, len(known)))}:
            self._check_tag(name, tag, result)

    def _tag_exists(self, name: str, tag: str) -> bool:
        return os.path.lexists(self.mount.path / name / ".versions" / tag)

    def _check_tag(self, name: str, tag: str, result: RoundResult) -> None:
        """The version that a writer made must hold its directory as it was, wherever it is shown."""
        try:
            shown = outline_of(look_at_tree(f"{self.mount.path}/{name}/.versions/{tag}"))
        except (OSError, AssertionError) as e:
            result.findings.append(f"{name}: version {tag}: {e}")
            return
        held = self._tags[name, tag]
        if shown != held:
            wrong = [p for p in shown.keys() | held.keys() if shown.get(p) != held.get(p)]
            lines = [f"{p}: {shown.get(p)}, should be {held.get(p)}" for p in sorted(wrong)[:4]]
            result.findings.append(f"{name}: version {tag} differs in {len(wrong)} names: {'; '.join(lines)}")

    def _check_versions(self, result: RoundResult) -> None:
        """Nothing that was ever listed is gone or changed."""
        fresh: list[tuple[str, str]] = []
        for line in self._watched().read_text().splitlines() if self._watched().exists() else []:
            what, unit, version, *digest = json.loads(line)
            self._listed.add((unit, version))
            if what == "hashed":
                self._hashed[unit, version] = digest[0]
                fresh.append((unit, version))
        for unit in sorted({unit for unit, _ in self._listed}):
            try:
                now = set(list_versions(str(self.mount.path), unit))
            except OSError as e:
                result.findings.append(f"the versions of {unit} cannot be listed: {e}")
                continue
            for _, version in sorted(one for one in self._listed if one[0] == unit and one[1] not in now):
                result.findings.append(f"{unit}: {version} was listed and is gone")
            self._listed |= {(unit, version) for version in now}
        result.versions = len(self._listed)
        old = sorted(self._hashed.keys() - set(fresh))
        for one in {*fresh, *self._chance.sample(old, k=min(_OLD_VERSIONS_A_ROUND, len(old)))}:
            self._check_version(one, result)

    def _check_version(self, one: tuple[str, str], result: RoundResult) -> None:
        result.versions_hashed += 1
        try:
            digest = version_digest(str(self.mount.path), *one)
        except (OSError, AssertionError) as e:
            result.findings.append(f"{one[0]}: {one[1]} cannot be read: {e}")
            return
        if digest != self._hashed[one]:
            result.findings.append(f"{one[0]}: {one[1]} has changed")

    def _check_command_line(self, result: RoundResult) -> None:
        """One unit a round: `log` names the roots that it named before, `verify` finds nothing."""
        unit = self._chance.choice(sorted({name.partition("/")[0] for name in WRITERS}))
        try:
            roots = {version.number: version.root for version in self.mount.versions(unit)}
            if roots and not self.mount.verified(unit):
                result.findings.append(
                    f"verify of {unit}: {self.mount.facts('verify', str(self.mount.path / unit))}"
                )
        except AssertionError as e:
            result.findings.append(f"the command line on {unit}: {str(e)[:600]}")
            return
        for number, root in self._roots.get(unit, {}).items():
            if roots.get(number) != root:
                result.findings.append(f"{unit}: version {number} has root {roots.get(number)}, had {root}")
        self._roots[unit] = roots


def _store_findings(store_check: subprocess.Popen[bytes]) -> list[str]:
    said, errors = store_check.communicate(timeout=_CHECK_S)
    if store_check.returncode:
        return [f"storecheck failed: {errors.decode(errors='replace')[-800:]}"]
    return list(json.loads(said)["findings"])


def campaign(
    kills: int,
    seed: int,
    place: Path,
    kills_per_store: int,
    *,
    write_paths: Sequence[str] = WRITE_PATHS,
    longest_s: float = LONGEST_S,
    show: Callable[[RoundResult], None] = lambda _: None,
    stop_at_finding: bool = False,
) -> list[RoundResult]:
    """All rounds. Below `place`, which must be outside of any mount, stores come and go; what showed
    a finding stays for a look."""
    results: list[RoundResult] = []
    stores = 0
    while len(results) < kills:
        write_path = write_paths[stores % len(write_paths)]
        stores += 1
        folder = place / f"store{len(results):04d}"
        folder.mkdir(parents=True)
        one = Campaign(folder, folder / "store", f"{seed}:{len(results)}", write_path, longest_s)
        found = False
        with one.mounted():
            for _ in range(min(kills_per_store, kills - len(results))):
                result = one.run_round(len(results) + 1)
                results.append(result)
                show(result)
                found = found or bool(result.findings)
                if result.findings and stop_at_finding:
                    return results
                if result.is_last:
                    break
        if not found:
            shutil.rmtree(folder)
    return results
