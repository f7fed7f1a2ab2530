"""Every decoder of a stored or received format, with bytes to try it on.

The one rule: whatever the bytes, a decoder returns a value or raises the error that it promises, and takes
memory in proportion to what it was given. A new decoder gets its line in DECODERS.

Used by tests/store/test_fuzz.py for seconds, and by tests/fuzz.py for as long as one likes.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from bytes_reader import BytesReader
from golden import broken, vectors
from hypothesis import strategies as st

from ckptfs.daemon.config import parse_config
from ckptfs.daemon.messages import Log, Publish, decode_reply, decode_request, encode_request, encode_result
from ckptfs.store.codecs import Coder, Stored, decode_chunk, decode_chunks, decode_header
from ckptfs.store.dagcbor import decode_array_head, decode_node, decode_run
from ckptfs.store.digests import decode_digests, decode_digests_record
from ckptfs.store.errors import CkptfsError, Corrupt, InvalidRequest, NotFound, Unsupported
from ckptfs.store.file_seal import decode_file_seal
from ckptfs.store.formats import parse, probe_format
from ckptfs.store.formats.bounded_json import TooLarge, parse_members
from ckptfs.store.formats.dcp_metadata import read_shards
from ckptfs.store.frames import MAGIC, decode_frames, mend_frame
from ckptfs.store.gc import (
    marks_of_recipe,
    references_of_inode,
    references_of_pin,
    references_of_published,
    references_of_tree,
)
from ckptfs.store.hashing import chunk_id, crc64
from ckptfs.store.health_records import (
    decode_content_row,
    decode_content_sum,
    decode_health_record,
    decode_version_row,
)
from ckptfs.store.history import decode_mark, decode_unit, decode_version
from ckptfs.store.history_mirror import version_of
from ckptfs.store.history_scan import scan_history
from ckptfs.store.ids import ChunkId, UnitId, parse_cid_bytes, parse_cid_text
from ckptfs.store.inode import Inode, decode_inode
from ckptfs.store.journal import decode_operations, encode_operations
from ckptfs.store.keyring import decode_rotation
from ckptfs.store.layout import Format, decode_format, encode_format
from ckptfs.store.merge_record import decode_merge, decode_merge_row
from ckptfs.store.one_bit import mended
from ckptfs.store.page_sums import decode_page_sums, encode_page_sums
from ckptfs.store.parent_table import Lineage, decode_lineage, encode_lineage
from ckptfs.store.pins import PinnedDirectory, PinnedFile, decode_pin, encode_pin
from ckptfs.store.places import decode_places
from ckptfs.store.proof import decode_proof
from ckptfs.store.proof_check import check_proof
from ckptfs.store.recipe import decode_recipe
from ckptfs.store.remote.box import RemoteKey, remote_key_of
from ckptfs.store.remote.head import decode_head
from ckptfs.store.remote.kept import Kept, decode_kept
from ckptfs.store.remote.log_entry import Claim, Decision, decode_entry, encode_entry
from ckptfs.store.remote.names import decode_remote_format, parse_head_key, parse_shard_key
from ckptfs.store.remote.pack import pack_chunks
from ckptfs.store.remote.shard import decode_shard
from ckptfs.store.scrub_state import Finding, ScrubRun, encode_run
from ckptfs.store.scrub_state import decode_run as decode_scrub_run
from ckptfs.store.seal import decode_seal, head_of, make_seal
from ckptfs.store.segment_format import (
    Codec,
    Row,
    SegmentFacts,
    SegmentIndex,
    SegmentKind,
    decode_facts,
    decode_idx,
    decode_location,
    encode_facts,
    encode_idx,
)
from ckptfs.store.signing import SigningKey, public_key_of, signing_key_of
from ckptfs.store.tree import decode_tree
from ckptfs.store.units import Unit, encode_unit, unit_of
from ckptfs.store.version_names import check_tag, resolve, split_version
from ckptfs.store.writers import decode_writers, decode_writers_row

# What a decoder may take for bytes that say nothing, and for each byte: a CBOR list of one byte is 60.
FIXED_BYTES = 8 << 20
BYTES_PER_BYTE = 400

Decode = Callable[[bytes], object]


@dataclass(frozen=True)
class Decoder:
    """`whole` are encodings that are right; `sealed`: they end with a CRC-64, which is made right again
    after half of the changes, so that what lies behind the check is tried too."""

    decode: Decode
    whole: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = (Corrupt,)
    sealed: bool = False


def _hex(name: str, kind: str | None = None) -> tuple[bytes, ...]:
    found = [v for v in vectors(name) if kind is None or v.get("kind") == kind]
    return tuple(bytes.fromhex(v["hex"]) for v in found)


def _all(function: Callable[[bytes], Iterable[object]]) -> Decode:
    return lambda encoded: list(function(encoded))


def _text(function: Callable[[str], object]) -> Decode:
    """A decoder of text that comes from a command line: any bytes, as Python shows them."""
    return lambda encoded: function(encoded.decode("utf-8", "surrogateescape"))


def _proof(encoded: bytes) -> object:
    """What decodes is also checked: it may not hold, and never ends in anything else."""
    return check_proof(decode_proof(encoded))


def _layout(name: str) -> Decode:
    def decode(encoded: bytes) -> object:
        probe_format(encoded[:64], name)
        layout = parse(BytesReader(encoded), name, lambda other: BytesReader(encoded))
        end = 0
        for tensor in layout.tensors if layout is not None else ():
            assert end <= tensor.offset < tensor.end <= len(encoded), tensor
            end = tensor.end
        return layout

    return decode


def _encoded_chunk() -> Decode:
    """What a row says is right (length, codec), and so are the parents; only the stored bytes are not."""
    coder = Coder()
    rows: dict[ChunkId, Stored] = {}
    lengths: dict[int, ChunkId] = {}
    for vector in vectors("encoded_chunk"):
        lengths[vector["length"]] = ChunkId(bytes.fromhex(vector["id"]))
        for parent in vector["parents"]:
            plain = bytes.fromhex(parent["hex"])
            rows[chunk_id(plain)] = Stored(0, len(plain), plain)

    def decode(encoded: bytes) -> object:
        header = decode_header(encoded)
        chunk = lengths.get(header.length)
        if chunk is None:
            raise Corrupt("the row says another length")
        own = Stored(header.codec, header.length, encoded)

        def fetch(asked: ChunkId) -> Stored:
            if asked != chunk and asked not in rows:
                raise NotFound("no such parent")  # which one, the bytes decide
            return own if asked == chunk else rows[asked]

        together = {one: bytes(plain.view) for one, plain in decode_chunks([chunk], fetch, coder).items()}
        try:
            alone = decode_chunk(chunk, fetch, coder)
        except CkptfsError:
            assert not together, "what is wrong alone is wrong with others"
            raise
        assert together in ({}, {chunk: alone})
        return alone

    return decode


def _version_text(text: str) -> object:
    split_version(text)
    return resolve(text, (decode_version(_hex("history", "version")[0]),), {"good": 1})


@cache
def decoders() -> dict[str, Decoder]:
    """All decoders by name."""
    chunk = ChunkId(b"\x11" * 32)
    inode = Inode(0o100644, 1, 2, ((1, b"a"),), 1, 2, 3)
    pin = PinnedFile(7, (PinnedDirectory(b"d", 0o40755, 1, 2, 3, 4),), b"f", inode, ((b"user.x", b"y"),))
    rows = (Row(chunk, 0, 10, 10), Row(ChunkId(b"\x22" * 32), 40, 3, 3, flags=1))
    index = SegmentIndex(42, SegmentKind.ADOPTED, 5, 8192, rows, b"abc")
    delta = Row(ChunkId(b"\x33" * 32), 0, 10, 20, Codec.DELTA, 0, 1, (chunk,))
    cast = Row(ChunkId(b"\x44" * 32), 10, 5, 20, Codec.CAST, 0, 2, (delta.chunk, chunk))
    encoded = SegmentIndex(43, SegmentKind.ENCODED, 5, 100, (delta, cast, Row(chunk, 15, 3, 3)))
    unit = Unit(UnitId(b"u" * 16), b"run", 5, 2, bytes(32), 3, 1, 99, b"run", 1, 1)
    run = ScrubRun(1, 2, 3, 4, 5, (Finding("place", "what", chunk),))
    facts = SegmentFacts(SegmentKind.ENCODED, 1, 2, 3, 4, spared_bytes=5)
    msgpack = (encode_facts(facts), encode_unit(unit))
    files = sample_files()
    refused = (InvalidRequest,)
    return {
        "dag-cbor": Decoder(decode_node, _hex("dagcbor") + _hex("tree")),
        "dag-cbor array": Decoder(
            lambda e: list(decode_run(e, *reversed(decode_array_head(e, 0)))), (b"\x82\1\2",)
        ),
        "tree": Decoder(decode_tree, _hex("tree")),
        "tree references": Decoder(_all(references_of_tree), _hex("tree")),
        "recipe": Decoder(decode_recipe, _hex("recipe")),
        "recipe marks": Decoder(marks_of_recipe, _hex("recipe")),
        "idx": Decoder(decode_idx, (encode_idx(index), encode_idx(encoded)), sealed=True),
        "lineage": Decoder(decode_lineage, (encode_lineage(Lineage(3, (chunk, chunk))),)),
        "encoded chunk": Decoder(
            _encoded_chunk(),
            _hex("encoded_chunk"),
            (Corrupt, Unsupported, NotFound),
            sealed=True,
        ),
        "location": Decoder(decode_location, (bytes(26), b"\xff" * 26)),
        "places": Decoder(lambda e: decode_places([chunk], [e]), (bytes(26), b"\xff" * 26)),
        "segment facts": Decoder(decode_facts, msgpack),
        "frames": Decoder(_all(decode_frames), _hex("frames"), (), sealed=True),
        "mended frame": Decoder(lambda e: mend_frame(e, 0, 1, range(1, 12)), _hex("frames"), (), sealed=True),
        "mended": Decoder(mended, (encode_idx(index),), (), sealed=True),
        "history": Decoder(lambda e: scan_history(e, 0), _hex("frames"), (), sealed=True),
        "digests record": Decoder(decode_digests_record, _hex("digests")),
        "digests row": Decoder(decode_digests, (bytes(80),)),
        "health record": Decoder(decode_health_record, _hex("health")),
        "health row": Decoder(
            decode_content_row, tuple(bytes.fromhex(row) for v in vectors("health") for row in v["rows"])
        ),
        "health row's sum": Decoder(
            decode_content_sum, tuple(bytes.fromhex(row) for v in vectors("health") for row in v["rows"])
        ),
        "version's health row": Decoder(
            decode_version_row, tuple(bytes.fromhex(v["version_row"]) for v in vectors("health"))
        ),
        "version record": Decoder(decode_version, _hex("history", "version")),
        "version row": Decoder(version_of, _hex("history_row")),
        "unit record": Decoder(decode_unit, _hex("history", "unit")),
        "seal": Decoder(
            decode_seal,
            (make_seal(SigningKey(bytes(32)), UnitId(b"u" * 16), bytes(32), 1, bytes(32)).encode(),),
        ),
        "rotation record": Decoder(decode_rotation, _hex("rotation")),
        "file seal": Decoder(decode_file_seal, (bytes(80), b"ab" * 80 + b"\n"), refused),
        "head": Decoder(_text(head_of), (b"3:" + b"5e" * 32, b"5e" * 32), refused),
        "signing key": Decoder(_text(signing_key_of), (SigningKey(bytes(32)).pem().encode(),), refused),
        "public key": Decoder(_text(public_key_of), (SigningKey(bytes(32)).public.pem().encode(),), refused),
        "proof": Decoder(_proof, tuple(json.dumps(v["proof"]).encode() for v in vectors("proof"))),
        "mark record": Decoder(decode_mark, _hex("history", "mark")),
        "unit row": Decoder(unit_of, msgpack),
        "inode": Decoder(decode_inode, _hex("inode")),
        "inode references": Decoder(_all(references_of_inode), _hex("inode")),
        "pin": Decoder(decode_pin, (encode_pin(pin),)),
        "pin references": Decoder(_all(references_of_pin), (encode_pin(pin),)),
        "published references": Decoder(_all(references_of_published), (bytes(32),)),
        "journal record": Decoder(
            decode_operations, (encode_operations([(1, b"k", b"v"), (2, b"k", None)]),)
        ),
        "writers record": Decoder(decode_writers, _hex("writers")),
        "writers row": Decoder(
            decode_writers_row, tuple(bytes.fromhex(v["row"]) for v in vectors("writers"))
        ),
        "merge record": Decoder(decode_merge, _hex("merge")),
        "merge row": Decoder(decode_merge_row, tuple(bytes.fromhex(v["row"]) for v in vectors("merge"))),
        "page sums": Decoder(decode_page_sums, (encode_page_sums([1, 2]),), sealed=True),
        "scrub run": Decoder(decode_scrub_run, (encode_run(run),)),
        "pack": Decoder(_all(pack_chunks), _hex("remote", "pack"), (Corrupt, Unsupported)),
        "shard": Decoder(decode_shard, _hex("remote", "shard"), (Corrupt, Unsupported), sealed=True),
        "remote log": Decoder(
            lambda encoded: decode_entry(encoded, 3),
            (encode_entry(3, Claim("node", bytes(16))), encode_entry(3, Decision(2, bytes(32)))),
        ),
        "remote kept": Decoder(
            decode_kept,
            (Kept(3, frozenset({UnitId(bytes(range(16)))}), frozenset({bytes(32)})).encode(),),
            sealed=True,
        ),
        "remote head": Decoder(decode_head, _hex("remote", "head"), sealed=True),
        "remote format": Decoder(decode_remote_format, _hex("remote", "format"), (Corrupt, Unsupported)),
        "remote box": Decoder(lambda e: RemoteKey(bytes(32)).disclose("packs/ab", e), _hex("remote", "box")),
        "remote key": Decoder(_text(remote_key_of), (b"5e" * 32,), refused),
        "remote object keys": Decoder(
            _text(lambda text: (parse_head_key(text), parse_shard_key(text))),
            (b"heads/" + b"5e" * 16 + b"/0000000000000001", b"shards/" + b"5e" * 32),
            (),
        ),
        "format file": Decoder(decode_format, (encode_format(Format()),), ()),
        "cid": Decoder(parse_cid_bytes, tuple(bytes.fromhex("01551e20") + bytes(32) for _ in "a"), refused),
        "cid text": Decoder(
            _text(parse_cid_text), (b"bafkr4ifpcne3t5pzugtkaqcn5i3nzskjtpfslsnnyejlpte2spfoihzsmi",), refused
        ),
        "tag": Decoder(_text(check_tag), (b"good", b"latest"), refused),
        "version": Decoder(
            _text(_version_text),
            (b"1", b"v000042_20261129T160211Z", b"latest", b"step:5~50", b"time:2026-11-29T16:00:00+01:00"),
            (InvalidRequest, NotFound),
        ),
        "request": Decoder(
            decode_request,
            (encode_request(Log(path="/a")), encode_request(Publish(path="/a", step=3))),
            refused,
        ),
        "reply": Decoder(decode_reply, (encode_result({"a": [1, None]}),), refused),
        "configuration": Decoder(
            _text(parse_config), (b'settle_s = 1\nunits = ["/*"]\nmin_free = "5%"\n',), refused
        ),
        "json members": Decoder(
            parse_members,
            (b'{"a": {"b": [1, 2]}, "step": 7}',),
            (ValueError, TooLarge, RecursionError),
        ),
        "dcp metadata": Decoder(lambda e: read_shards(BytesReader(e)), (files[".metadata"],), ()),
        **{
            f"layout of {name}": Decoder(_layout(name), tuple(files.values()), ())
            for name in ("x.safetensors", "x.pt", "x.bin", "x.gguf", "__0_0.distcp", ".metadata")
        },
    }


def sample_files() -> dict[str, bytes]:
    """A small file of each format that the parsers know, made without the frameworks."""
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"step": 3, "w": [1.0]}, 2))
        archive.writestr("x/byteorder", b"little")
        archive.writestr("x/data/0", bytes(64))
        archive.writestr("x/version", b"3\n")
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, 1) + struct.pack("<Q1sIQ2s", 1, b"k", 8, 2, b"vv")
    legacy = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {"w": 1}, ["0"]]
    return {
        "x.safetensors": len(header).to_bytes(8, "little") + header + bytes(16),
        "x.pt": zipped.getvalue(),
        "old.pt": b"".join(pickle.dumps(part, 2) for part in legacy) + bytes(24),
        "x.gguf": head + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 0, 0) + bytes(100),
        ".metadata": pickle.dumps({"state_dict_metadata": {}, "storage_data": {}}, 2),
    }


def inputs(decoder: Decoder) -> st.SearchStrategy[bytes]:
    """Bytes for a decoder: changed encodings, with a right checksum if that is what it checks, and noise."""
    changed = broken(st.sampled_from(decoder.whole))
    if decoder.sealed:
        changed = st.one_of(changed, changed.map(resealed))
    return st.one_of(changed, changed, st.binary(max_size=2000))


def resealed(encoded: bytes) -> bytes:
    """The same with a right CRC-64 at its end (in frames, at the end of the last)."""
    start = max(encoded.rfind(MAGIC), 0)
    body = encoded[:-8]
    return body + crc64(body[start:]).to_bytes(8, "little")


def check(decoder: Decoder, encoded: bytes) -> bool:
    """Decode once, within bounds; whether there was a value."""
    tracemalloc.start()
    try:
        decoder.decode(encoded)
        is_value = True
    except decoder.errors:
        is_value = False
    finally:
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert taken <= FIXED_BYTES + BYTES_PER_BYTE * len(encoded), f"{taken} bytes for {len(encoded)}"
    return is_value
