"""The configuration: one TOML file, every key with a default, unknown keys refused.

One rule: a key is accepted only if this version acts on it. A key that later versions will know is
refused by its name, so that nobody relies on what does not happen yet.

Source: ARCHITECTURE.md, section 8.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ckptfs.store.encoding_level import Level
from ckptfs.store.errors import InvalidRequest
from ckptfs.store.retention import Policy

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40, "PI": 1 << 50}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?i?)b?\s*", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

_REMOTE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REMOTE_SCHEMES = ("file:///", "s3://", "az://", "gs://")
CREDENTIAL = "credential:"

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
Days = Annotated[float, msgspec.Meta(gt=0, le=36_500)]


After = Annotated[float, msgspec.Meta(ge=0, le=3e9)] | Literal["never"]


class UnitPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[policy]]`: what of the units that the glob `path` names is kept, see store/retention.py.
    Of several that match a unit the first holds. `versions = false`: none are made of them.
    `encode_after_s`: as in Config, for these."""

    path: str
    keep_last: Count | None = None
    keep_days: Days | None = None
    keep_every: Count | None = None
    versions: bool = True
    encode_after_s: After | None = None

    @property
    def retention(self) -> Policy:
        """What of it concerns retention."""
        return Policy(self.path, self.keep_last, self.keep_days, self.keep_every)


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[remote]]`: a place for copies, called `name`, at `url` (file:///DIR, s3://BUCKET/PREFIX,
    az://ACCOUNT/CONTAINER/PREFIX, gs://BUCKET/PREFIX). `endpoint` and `region` are for what speaks S3;
    credentials come from the environment. With `key`, the file of a key (64 hex digits) or
    "credential:NAME" of the service manager, all that goes there is encrypted. `push = false`: only
    `ckptfs push` copies, and not every publish. `partial = true`: versions that are not complete, too, such
    as those of nodes that have some ranks of a run each. At most `rate_mib_s` MiB a second are sent (0: as
    fast as it goes).
    """

    name: str
    url: str
    key: str = ""
    endpoint: str = ""
    region: str = ""
    push: bool = True
    partial: bool = False
    rate_mib_s: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] = 0.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one mount is told.

    `settle_s` is how long a directory must be quiet before it is published, `settle_max_s` how long
    a change waits at most for its unit to be quiet. `units` are globs of directories that are
    versioned as a whole. `min_free` is the space that history gives way to: bytes, a size with a
    unit ("10GiB"), a share of the disk ("5%"), or "auto". `policy` says what history is wanted of
    which units; of the others all is kept while there is room. `key` is the file of the key that versions
    are signed with (made if it is not there); "" is the usual place, "none" leaves them unsigned.
    Every `scrub_every_days` all that is stored is read again and checked, at `scrub_rate_mib_s` MiB a
    second (0: never by itself). `digests`: whole-file digests are made of what versions hold, in the
    background, and with `health` their float tensors are looked at on the way. `provenance`: versions say
    which processes wrote them. Saves that are not the newest of their kind are encoded, without loss,
    `encode_after_s` seconds after their version was made ("never": only by `ckptfs encode`),
    `encode_rate_mib_s` MiB a second at most (0: as fast as it goes); `encode_level` "small" makes them
    smaller still, and slower to make and to read. `metrics`: where Prometheus finds the
    daemon's figures, an address such as "127.0.0.1:9469" or the path of a file that ends in ".prom" (for the
    node exporter's textfile collector); "" keeps none. Units stand in it by their ids, with `metrics_names`
    by name. `remote`: where versions are copied to; `copies`: how many of them must have a version before it
    counts as copied (all, if it is not said).
    """

    settle_s: Seconds = 2.0
    settle_max_s: Seconds = 30.0
    units: tuple[str, ...] = ()
    min_free: int | str = "auto"
    key: str = ""
    policy: tuple[UnitPolicy, ...] = ()
    remote: tuple[RemoteConfig, ...] = ()
    copies: Count | None = None
    scrub_rate_mib_s: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] = 32.0
    scrub_every_days: Annotated[float, msgspec.Meta(ge=0, le=36_500)] = 30.0
    digests: bool = True
    health: bool = True
    provenance: bool = True
    encode_after_s: After = "never"
    encode_rate_mib_s: Annotated[float, msgspec.Meta(ge=0, le=1 << 20)] = 64.0
    encode_level: Level = "fast"
    metrics: str = ""
    metrics_names: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    write_path: Literal["auto", "plain"] = "auto"

    def min_free_bytes(self, disk_bytes: int) -> int | None:
        """The space to keep free on a disk of `disk_bytes`; None where ckptfs is to choose."""
        if self.min_free == "auto":
            return None
        if isinstance(self.min_free, str) and (share := _PERCENT.fullmatch(self.min_free)):
            return int(disk_bytes * float(share[1]) / 100)
        return size_bytes(self.min_free)


def load_config(path: str | None) -> Config:
    """The configuration in the file `path`, or the defaults; InvalidRequest says what is wrong with it."""
    if path is None:
        return Config()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise InvalidRequest(f"cannot read the configuration {path}: {reason}") from None
    try:
        return parse_config(text)
    except InvalidRequest as e:
        raise InvalidRequest(f"{path}: {e}") from None


def parse_config(text: str) -> Config:
    """The configuration in the TOML `text`; InvalidRequest says what is wrong with it."""
    try:
        text.encode()
        table = tomllib.loads(text)
    except UnicodeEncodeError:
        raise InvalidRequest("it is not UTF-8") from None  # a surrogate stands for a byte that is none
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise InvalidRequest(f"not TOML: {e}") from None
    for key in table:
        _check_key(key)
    try:
        config = msgspec.convert(table, Config)
    except msgspec.ValidationError as e:
        raise InvalidRequest(_sentence(str(e))) from None
    if "settle_max_s" not in table:
        config = msgspec.structs.replace(config, settle_max_s=max(config.settle_max_s, config.settle_s))
    _check_values(config)
    return config


def size_bytes(size: int | str) -> int:
    """Bytes of a size as people write it: 1000, "1000", "10GB" (powers of ten), "10GiB" (of two)."""
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size)
    if found is None:
        raise InvalidRequest(f'{size!r} is not a size; write bytes, "10GiB" or "5%"')
    letters = found[2].upper()
    factor = _BINARY.get(letters) or _UNITS.get(letters)
    if factor is None:
        raise InvalidRequest(f'{size!r} is not a size; write bytes, "10GiB" or "5%"')
    return int(float(found[1]) * factor)


def is_metrics_file(metrics: str) -> bool:
    """Whether `metrics` names a file and not an address."""
    return metrics.startswith("/") and metrics.endswith(".prom")


def metrics_address(metrics: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:9469" or "[::1]:9469"."""
    host, _, port = metrics.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidRequest(
            f'`metrics`: {metrics!r} is neither an address such as "127.0.0.1:9469" nor an absolute '
            'path that ends in ".prom"'
        )
    return host.strip("[]"), int(port)


def _check_key(key: str) -> None:
    known = Config.__struct_fields__
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known keys are {', '.join(known)}"
    raise InvalidRequest(f"unknown key `{key}`; {hint}")


def _check_values(config: Config) -> None:
    if config.settle_max_s < config.settle_s:
        raise InvalidRequest("`settle_max_s` is shorter than `settle_s`")
    for glob in config.units:
        if not _is_glob(glob):
            raise InvalidRequest(f'`units`: {glob!r} is not a glob of directories such as "/*/*"')
    if config.key not in ("", "none") and (not config.key.startswith("/") or "\0" in config.key):
        raise InvalidRequest('`key` is not the absolute path of a file (or "none")')
    for policy in config.policy:
        if policy.path != "/" and not _is_glob(policy.path):
            raise InvalidRequest(f'`policy`: {policy.path!r} is not a glob of units such as "/*"')
    _check_remotes(config.remote)
    if config.copies is not None and config.copies > len(config.remote):
        raise InvalidRequest(f"`copies`: {config.copies} of {len(config.remote)} remotes cannot be had")
    if isinstance(config.min_free, int) and config.min_free < 0:
        raise InvalidRequest("`min_free` is negative")
    if config.metrics and not is_metrics_file(config.metrics):
        metrics_address(config.metrics)
    share = _PERCENT.fullmatch(str(config.min_free))
    if share is not None and float(share[1]) >= 100:
        raise InvalidRequest(f"`min_free`: {config.min_free} leaves no room at all")
    config.min_free_bytes(1)


def _check_remotes(remotes: tuple[RemoteConfig, ...]) -> None:
    for remote in remotes:
        if not _REMOTE_NAME.fullmatch(remote.name):
            raise InvalidRequest(f"`remote`: {remote.name!r} is not a name of letters, digits, - and _")
        if not remote.url.startswith(_REMOTE_SCHEMES) or "\0" in remote.url:
            schemes = ", ".join(f"{scheme}…" for scheme in _REMOTE_SCHEMES)
            raise InvalidRequest(f"`remote`: {remote.url!r} is not one of {schemes}")
        if remote.key and not remote.key.startswith(("/", CREDENTIAL)):
            raise InvalidRequest(
                f'`remote`: the key {remote.key!r} is neither an absolute path nor "{CREDENTIAL}NAME"'
            )
        if (remote.endpoint or remote.region) and not remote.url.startswith("s3://"):
            raise InvalidRequest("`remote`: `endpoint` and `region` are for s3:// only")
    names = [remote.name for remote in remotes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"`remote`: two are called {twice!r}")


def _is_glob(glob: str) -> bool:
    parts = glob.split("/")[1:]
    return glob.startswith("/") and all(part not in ("", ".", "..") for part in parts)


def _sentence(said: str) -> str:
    """msgspec's "Expected `float`, got `str` - at `$.settle_s`", with the key in front."""
    what, _, where = said.partition(" - at `$.")
    return f"`{where.rstrip('`')}`: {what[0].lower()}{what[1:]}" if where else said
