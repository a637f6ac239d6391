"""Host memory blocks for preempted sequences. Holds ids only; the runner copies the data."""

from __future__ import annotations

from collections.abc import Iterable


class HostPool:
    """Ownership of `num_blocks` host blocks. Misuse raises `ValueError`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Host blocks without owner."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Host blocks that hold a sequence's KV."""
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Take `count` host blocks; `ValueError` when fewer are free."""
        if count > len(self._free):
            raise ValueError(f"asked for {count} host blocks, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def release(self, host_block_ids: Iterable[int]) -> None:
        """Free host blocks; `ValueError` for one that is not in use."""
        for host_block_id in host_block_ids:
            if host_block_id not in self._used:
                raise ValueError(f"host block {host_block_id} is released but has no owner")
            self._used.remove(host_block_id)
            self._free.append(host_block_id)

    def check(self) -> None:
        """Raise `AssertionError` unless every host block is either free or used."""
        assert sorted([*self._free, *self._used]) == list(range(self.num_blocks)), (
            "a host block is lost"
        )
