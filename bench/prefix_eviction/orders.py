"""Orders in which a tier gives up its blocks. They see a use of a block, and never its content."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from engine.core.blocks.eviction import Segments
from engine.core.blocks.host_pool import ONCE_SHARE


class Use(NamedTuple):
    """A use of a block: the most that one of its chain's blocks from it on costs, times how often
    that was used; the number of the request that will use it next; and whether it is known to have
    been used before."""

    worth: float
    next_use: float
    is_again: bool = True


class Order(Protocol):
    """What a tier holds, in some order."""

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def use(self, block: int, use: Use) -> None:
        """Add a block, or note its use. Of a prompt, the last block comes first."""

    def copy_back(self, block: int, use: Use) -> None:
        """Note the use of a block that the pool has from here on too."""

    def evict(self) -> int:
        """Remove a block and return it."""


class _Copying:
    """An order in which a block that is copied back is used as any other."""

    def use(self, block: int, use: Use) -> None:
        raise NotImplementedError

    def copy_back(self, block: int, use: Use) -> None:
        self.use(block, use)


class LeastRecent(_Copying):
    """The block that was not used for longest goes first."""

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def use(self, block: int, use: Use) -> None:
        self._blocks[block] = None
        self._blocks.move_to_end(block)

    def evict(self) -> int:
        return self._blocks.popitem(last=False)[0]


class Segmented:
    """In segments, what was copied back first: as the product does."""

    def __init__(self, capacity: int) -> None:
        self._segments: Segments[int] = Segments(int(ONCE_SHARE * capacity))
        self._held: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def use(self, block: int, use: Use) -> None:
        if use.is_again or block in self._held:
            self._segments.use(block)
        else:
            self._segments.add(block)
        self._held.add(block)

    def copy_back(self, block: int, use: Use) -> None:
        self._segments.use_elsewhere(block)

    def evict(self) -> int:
        block = next(self._segments.in_order())
        self._segments.forget(block)
        self._held.remove(block)
        return block


class S3Fifo(_Copying):
    """Three queues (Yang et al., SOSP '23): a tenth for what is new, the rest for what was used
    there, and the names of what has left the first one."""

    _MOST_USES = 3

    def __init__(self, capacity: int) -> None:
        self._most_new = max(1, capacity // 10)
        self._most_gone = max(1, capacity - self._most_new)
        self._new: deque[int] = deque()
        self._main: deque[int] = deque()
        self._gone: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, block: int) -> bool:
        return block in self._uses

    def use(self, block: int, use: Use) -> None:
        if block in self._uses:
            self._uses[block] = min(self._uses[block] + 1, self._MOST_USES)
            return
        self._uses[block] = 0
        if block in self._gone:
            del self._gone[block]
            self._main.append(block)
        else:
            self._new.append(block)

    def evict(self) -> int:
        while self._new and (len(self._new) >= self._most_new or not self._main):
            block = self._new.popleft()
            if self._uses[block]:
                self._uses[block] = 0
                self._main.append(block)
                continue
            self._gone[block] = None
            if len(self._gone) > self._most_gone:
                self._gone.popitem(last=False)
            del self._uses[block]
            return block
        while True:
            block = self._main.popleft()
            if not self._uses[block]:
                del self._uses[block]
                return block
            self._uses[block] -= 1
            self._main.append(block)


class _Ranked(_Copying):
    """The block with the lowest rank goes first; of equal ones, the one that was used first."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._turn = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, block: int) -> bool:
        return block in self._ranks

    def _rank(self, block: int, rank: float) -> None:
        self._turn += 1
        self._ranks[block] = rank, self._turn
        heappush(self._heap, (rank, self._turn, block))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(*rank, block) for block, rank in self._ranks.items()]
            heapify(self._heap)

    def _pop(self) -> tuple[float, int]:
        while True:
            rank, turn, block = heappop(self._heap)
            if self._ranks.get(block) == (rank, turn):
                del self._ranks[block]
                return rank, block


class CostTimesChance(_Ranked):
    """The block whose loss costs least: its worth, above what was given up last (GreedyDual), so
    that what is not used any more gets cheaper."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._floor = 0.0

    def use(self, block: int, use: Use) -> None:
        self._rank(block, self._floor + use.worth)

    def evict(self) -> int:
        self._floor, block = self._pop()
        return block


class KnownFuture(_Ranked):
    """The block that is used again last (Belady): no order without this knowledge does better by
    much."""

    def __init__(self, capacity: int) -> None:
        super().__init__()

    def use(self, block: int, use: Use) -> None:
        self._rank(block, -use.next_use)

    def evict(self) -> int:
        return self._pop()[1]


ORDERS: dict[str, Callable[[int], Order]] = {
    "lru": LeastRecent,
    "segmented": Segmented,
    "s3_fifo": S3Fifo,
    "cost_times_chance": CostTimesChance,
    "known_future": KnownFuture,
}
