"""The file of one block: a header, and the block's bytes. Pure.

    8  "pdservKV"
    4  version
    4  bytes of the header, all of it
   32  SHA-256 of the KV fingerprint
   16  hash of the block
    8  bytes of the content
    8  XXH3-64 of the content, seeded with that of the header before it

Integers are little-endian. The content is the block, or what `block_seal` makes of it.
"""

from __future__ import annotations

import hashlib
import struct

from xxhash import xxh3_64_intdigest

from common.kv.blocks import BlockHash

VERSION = 1
_MAGIC = b"pdservKV"
_FIELDS = struct.Struct("<8sII32s16sQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size


class CorruptFile(Exception):
    """A file does not hold the block that its name says."""


def file_header(fingerprint: str, block_hash: BlockHash, content: memoryview) -> bytes:
    """Return the header of a block's file."""
    fields = header_fields(fingerprint, block_hash, content.nbytes)
    return fields + _SUM.pack(_sum(fields, content))


def check_file(header: bytes, fingerprint: str, block_hash: BlockHash, content: memoryview) -> None:
    """Raise `CorruptFile` unless header and content are what was written under this hash."""
    fields = header_fields(fingerprint, block_hash, content.nbytes)
    if header[: _FIELDS.size] != fields:
        raise CorruptFile("the header is that of another block, layout or version")
    if header[_FIELDS.size :] != _SUM.pack(_sum(fields, content)):
        raise CorruptFile("the checksum is wrong")


def header_fields(fingerprint: str, block_hash: BlockHash, num_bytes: int) -> bytes:
    """Return the header without its sum: whose block a content of so many bytes is."""
    digest = hashlib.sha256(fingerprint.encode()).digest()
    return _FIELDS.pack(_MAGIC, VERSION, HEADER_BYTES, digest, block_hash, num_bytes)


def _sum(fields: bytes, content: memoryview) -> int:
    digest: int = xxh3_64_intdigest(content, xxh3_64_intdigest(fields))
    return digest
