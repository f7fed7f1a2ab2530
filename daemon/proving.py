"""Prove: the proof of a saved file, or of one tensor in it, for whoever has neither store nor daemon.

One rule: a proof is checked, as its reader will check it, before it is handed out; and nothing is stated
about a version that nobody has sealed, for it would look as if somebody had.

The index thread reads; a worker thread hashes and signs.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from ckptfs.daemon.addresses import Address, Addresses
from ckptfs.daemon.messages import Json
from ckptfs.daemon.saved_files import Saved, walk, way_into
from ckptfs.store.errors import Corrupt, InvalidRequest, NotFound
from ckptfs.store.far_reader import FarReader
from ckptfs.store.formats import Layout, Reader, Tensor, parse
from ckptfs.store.formats.layout import tensor as described
from ckptfs.store.histories import Histories
from ckptfs.store.history import VersionRecord
from ckptfs.store.history_proof import Evidence, doubt_of, prove
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import RecipeId, TreeId
from ckptfs.store.keyring import Keyring, Rotation
from ckptfs.store.proof import Proof, decode_proof, encode_proof, make_statement, proof_json
from ckptfs.store.proof_check import check_proof
from ckptfs.store.proof_making import batch_of_version, proven_file, proven_pieces
from ckptfs.store.recipe import Recipe
from ckptfs.store.segments import Segments
from ckptfs.store.signing import PublicKey
from ckptfs.store.tree import Entry

_MOST_NAMES = 10_000
_ENTRIES_A_STEP = 1000
MayRead = Callable[[Entry], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Material:
    """All that a proof is made of: the file `path` of a version, all files of that, the unit's history
    and name."""

    record: VersionRecord
    path: bytes
    recipe: Recipe
    files: list[tuple[bytes, bytes]]
    evidence: Evidence
    name: bytes


class Prover:
    """Makes proofs. Belongs to the index thread; the key in use, if any, signs what no root binds."""

    def __init__(
        self,
        segments: Segments,
        histories: Histories,
        addresses: Addresses,
        keyring: Keyring,
        *,
        for_strangers: bool = True,
    ) -> None:
        """`for_strangers`: state also what a key has sealed that does not lead to ours by rotations."""
        self._for_strangers = for_strangers
        self._segments = segments
        self._histories = histories
        self._addresses = addresses
        self._keyring = keyring
        # A proof of a large file takes some 150 MB while it is made, so there is one at a time.
        self._turn = trio.CapacityLimiter(1)

    async def proof(self, address: Address, tensor: str | None, may_read: MayRead) -> Json:
        """The proof of a file in a version (the latest, if none is named), or of one tensor in it.

        `may_read` tells whether the caller may read a saved file beside it, in which names of tensors may
        stand. NotFound: no such file or tensor. InvalidRequest: it is no file, or has no tensors.
        Corrupt: the store does not hold what its history says.
        """
        record = self._addresses.record(address)
        way = self._way(address, record)
        async with self._turn:
            return await self._proof(address, record, way, tensor, may_read)

    async def _proof(
        self, address: Address, record: VersionRecord, way: list[Entry], tensor: str | None, may_read: MayRead
    ) -> Json:
        assert address.unit is not None and way[-1].recipe is not None
        recipe = self._segments.read_recipe(way[-1].recipe)
        found = None
        if tensor is not None:
            beside = self._beside(way[-2], may_read)
            found = await trio.to_thread.run_sync(self._tensor, way[-1], recipe, beside, tensor)
        material = _Material(
            record=record,
            path=b"/".join(address.inner),
            recipe=recipe,
            files=await self._files(record),
            evidence=self._histories.evidence(record.unit),
            name=address.unit.name,
        )
        return await trio.to_thread.run_sync(self._made, material, found)

    def _way(self, address: Address, record: VersionRecord) -> list[Entry]:
        way = way_into(self._segments, record.top, address.inner)
        text = os.fsdecode(b"/".join(address.inner))
        if len(way) <= len(address.inner):
            raise NotFound(f"{record.name} has no {text}")
        if way[-1].is_dir:
            what = f"{text} is" if text else "that is"
            raise InvalidRequest(f"{what} a directory; prove each file in it that matters")
        if not way[-1].is_file or way[-1].recipe is None:
            raise InvalidRequest(f"{text} is no regular file, and only such have content to prove")
        return way

    def _beside(self, folder: Entry, may_read: MayRead) -> dict[str, RecipeId]:
        """The files in a saved directory that the caller may read."""
        entries = () if folder.tree is None else self._segments.read_tree(folder.tree)
        return {os.fsdecode(one.name): one.recipe for one in entries if one.recipe and may_read(one)}

    async def _files(self, record: VersionRecord) -> list[tuple[bytes, bytes]]:
        """(path, file root) of every file of a version."""
        files = []
        for step, saved in enumerate(walk(self._segments, Saved(b"", record.top), _refuse)):
            if saved.entry.root is not None:
                files.append((saved.path, saved.entry.root))
            if step % _ENTRIES_A_STEP == 0:
                await trio.lowlevel.checkpoint()
        return files

    # -- in the worker thread -------------------------------------------------------------------

    def _tensor(self, entry: Entry, recipe: Recipe, beside: dict[str, RecipeId], name: str) -> Tensor:
        def sibling(other: str) -> Reader | None:
            identity = beside.get(other)
            if identity is None:
                return None
            far = trio.from_thread.run_sync(self._segments.read_recipe, identity)
            return FarReader(self._segments.file_reader(far))

        text = os.fsdecode(entry.name)
        return _named(text, parse(FarReader(self._segments.file_reader(recipe)), text, sibling), name)

    def _made(self, material: _Material, tensor: Tensor | None) -> Json:
        frames = scan_history(material.evidence.encoded, 0).frames
        proof = Proof(
            batch=batch_of_version(material.record.unit, frames, material.record),
            file=proven_file(material.files, material.path, material.recipe.size),
            pieces=proven_pieces(material.recipe, tensor),
            tensor=tensor,
            statement=None,
        )
        key = self._keyring.signing
        if key is not None and proof.batch.seal is not None:
            sealer = proof.batch.seal.key
            proof = replace(proof, rotations=self._vouched(material, sealer))
            if self._for_strangers or proof.rotations or sealer == key.public.raw:
                proof = replace(proof, statement=make_statement(key, proof, material.name))
        made = proof_json(proof)
        again = decode_proof(encode_proof(made))
        assert again == proof, "a proof does not decode to itself"
        raw = [one.key for one in (again.batch.seal, again.statement) if one is not None]
        check_proof(again, [PublicKey(key) for key in raw])
        return made

    def _vouched(self, material: _Material, sealer: bytes) -> tuple[Rotation, ...]:
        """The rotations from the key of a seal to ours, if we vouch for it: the history as a whole was
        checked, and the version was sealed while that key was in use."""
        way = self._keyring.way_from(sealer)
        if not way or doubt_of(prove(material.evidence, self._keyring.trusted), material.record) is not None:
            return ()
        return way


def _named(file: str, layout: Layout | None, name: str) -> Tensor:
    """The tensor of a name; NotFound says what there is instead."""
    if layout is None:
        raise InvalidRequest(f"{file} is of no format whose tensors are known; prove it without --tensor")
    found = next((one for one in layout.tensors if one.name == name), None)
    if found is not None:
        # As in the other formats, what DCP calls it becomes a text that a record can hold.
        return described(found.name, found.offset, found.length, found.dtype, found.shape)
    if not layout.tensors:
        damage = f" ({layout.damage})" if layout.damage else ""
        raise NotFound(f"{file} has no tensors{damage}")
    names = [one.name for one in layout.tensors[:_MOST_NAMES]]
    near = difflib.get_close_matches(name, names, cutoff=0.5) or names[:3]
    raise NotFound(
        f"{file} has no tensor {name!r}; it has {', '.join(map(repr, near))}, {len(layout.tensors)} in all"
    )


def _refuse(path: bytes, tree: TreeId, error: Corrupt) -> None:
    """A version of which a directory is damaged has no root to prove."""
    raise error
