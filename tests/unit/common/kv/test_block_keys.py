"""The short names of blocks, one by one and many at a time."""

from __future__ import annotations

from common.kv.blocks import block_key, block_keys, hash_full_blocks


def test_many_names_are_those_of_each_block() -> None:
    hashes = hash_full_blocks(range(160), 16, "layout")
    assert block_keys(hashes) == tuple(map(block_key, hashes))
    assert block_keys([bytes(range(16))]) == (0x0001020304050607,)
    assert block_keys(iter(())) == ()
