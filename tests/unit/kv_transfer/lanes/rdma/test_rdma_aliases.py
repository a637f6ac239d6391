"""One memory at several addresses."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.lanes.rdma.aliases import Aliases

SIZE = 3 * mmap.PAGESIZE


@pytest.mark.parametrize("offset", [0, mmap.PAGESIZE, 100])
def test_an_alias_is_the_same_memory_elsewhere(offset: int) -> None:
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)[offset:]
    aliases = Aliases(memory.ctypes.data, memory.nbytes)
    first, second = aliases.make(), aliases.make()
    assert len({memory.ctypes.data, first, second}) == 3
    memory[:] = 5
    ctypes.memset(first + 1, 6, 1)
    ctypes.memset(second + memory.nbytes - 1, 7, 1)
    assert memory[:3].tolist() == [5, 6, 5]
    assert memory[-2:].tolist() == [5, 7]
    assert ctypes.string_at(second, 2) == b"\x05\x06"
    aliases.close()
    aliases.close()
    assert memory[1] == 6


def test_an_alias_has_all_pages_of_memory_that_begins_within_one() -> None:
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)[100 : 100 + mmap.PAGESIZE]
    aliases = Aliases(memory.ctypes.data, memory.nbytes)
    start = aliases.make()
    holding = [line for line in _mappings() if line.start <= start < line.end]
    assert [line.end >= start + memory.nbytes for line in holding] == [True]
    aliases.close()


def test_private_memory_has_none() -> None:
    memory = np.zeros(1 << 20, np.uint8)
    with pytest.raises(OSError, match="cannot be mapped again"):
        Aliases(memory.ctypes.data, memory.nbytes).make()


def test_an_alias_that_was_dropped_takes_no_memory_and_its_address_is_not_used_again() -> None:
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    aliases = Aliases(memory.ctypes.data, memory.nbytes)
    made = set()
    for _ in range(200):
        address = aliases.make()
        assert address not in made
        made.add(address)
        ctypes.memset(address, 6, SIZE)
        aliases.drop(address)
    assert memory[0] == 6
    reserved = [line for line in _mappings() if line.start in made]
    assert all(line.permissions == "---p" for line in reserved)
    aliases.close()
    assert not {line.start for line in _mappings() if line.permissions == "---p"} & made


@dataclass(frozen=True, slots=True)
class Mapping:
    start: int
    end: int
    permissions: str


def _mappings() -> list[Mapping]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = []
    for line in lines:
        addresses, permissions, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        found.append(Mapping(start, end, permissions))
    return found
