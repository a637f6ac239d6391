"""One memory at several addresses."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from kv_transfer.rdma.aliases import Aliases

SIZE = 3 * mmap.PAGESIZE


@pytest.mark.parametrize("offset", [0, mmap.PAGESIZE, 100])
def test_an_alias_is_the_same_memory_elsewhere(offset: int) -> None:
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)[offset:]
    aliases = Aliases(memory.ctypes.data, memory.nbytes, max_count=2)
    first, second = aliases.make(), aliases.make()
    assert len({memory.ctypes.data, first, second}) == 3
    memory[:] = 5
    ctypes.memset(first + 1, 6, 1)
    ctypes.memset(second + memory.nbytes - 1, 7, 1)
    assert memory[:3].tolist() == [5, 6, 5]
    assert memory[-2:].tolist() == [5, 7]
    assert ctypes.string_at(second, 2) == b"\x05\x06"
    with pytest.raises(OSError, match="2 further addresses"):
        aliases.make()
    aliases.close()
    aliases.close()
    assert memory[1] == 6


def test_private_memory_has_none() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    with pytest.raises(OSError, match="cannot be mapped again"):
        Aliases(memory.ctypes.data, memory.nbytes, max_count=1).make()
