"""Random histories of a node's runner and cache on a card, each of which has one right outcome.

Requests of a few kinds come and leave at any time, and their answers and blocks are known. So every
answer, every block that leaves the card and all that lies there at the end can be compared,
whatever else happened: a difference is a wait or an event that is missing.

What happens is drawn, and what has been rare in a history is drawn the likelier (`HAPPENS`). A wait
that is missing shows only while the card has work left. The host waits for a step's tokens, so
`_after_chunks` acts where a step has drawn none.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.known_answers import MOST_DRAWN, SIZE, Kind, Live, content_of, peer_of  # isort: skip

import numpy as np

from common.kv.blocks import blocks_for
from engine.core.blocks.cache_copy import CacheCopy, CopyKind, CopyUnderWay
from engine.core.runner_contract import OnLayer
from engine.core.step.step_batch import batch_of
from engine.runner.model_runner import ModelRunner
from tests.support.engine.fake_card import bytes_sum
from tests.support.engine.moved_blocks import new_ring

MOST_SEATED = 4
NUM_BLOCKS, NUM_SLOTS, NUM_HOST_BLOCKS = 13, 24, 8
"""Few: what one request leaves is taken by the next one while the card still has work with it."""
AFTER_CHUNKS = ("sent unread", "swapped unread", "replaced", "more chunks")
HAPPENS = (
    "chunks", "more chunks", "mixed", "gone on", "left behind", "drafts", "accepted", "refused",
    "answered", "aborted", "replaced", "handed off", "sent", "from ring", "from peer",
    "peer closed", "swap_out", "swapped unread", "swap_in", "closed in mid-step",
    "closed in mid-copy",
)  # fmt: skip
"""What any four histories are to have in them."""


@dataclass(eq=False, slots=True)
class UnderWay:
    """Work beside the steps that uses these blocks. `end` waits for it; `swap` is looked at."""

    blocks: list[int]
    end: Callable[[], None]
    swap: CopyUnderWay | None = None
    is_from_peer: bool = False


class PlayedThread:
    """The thread that copies in host memory, whose turn comes when a history says so."""

    def __init__(self) -> None:
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.append((future, call))
        return future

    def turn(self) -> None:
        """Do what was submitted first, if there is anything."""
        if self._work:
            future, call = self._work.popleft()
            future.set_result(call())


class History:
    """Does one thing after the other, as `seed` draws them, and compares as it goes."""

    def __init__(
        self, runner: ModelRunner, kinds: Sequence[Kind], seed: int, thread: PlayedThread
    ) -> None:
        """Take the runner, whose thread for copies in host memory is `thread`."""
        self._runner, self._kinds, self._draw = runner, kinds, random.Random(seed)
        self._thread = thread
        cache: Any = runner.cache
        self._cache, self._pool = cache, cache.card_pool
        self._peer = peer_of(runner, kinds)
        memory = new_ring(runner.layout, NUM_SLOTS)
        self._pool.use_ring(memory)
        self._ring = memory.reshape(2, NUM_SLOTS, -1)
        self._free = list(range(NUM_BLOCKS))
        self._slots = list(range(NUM_SLOTS))
        self._host = list(range(NUM_HOST_BLOCKS))
        self._used: Counter[int] = Counter()
        self._left: set[int] = set()
        """Blocks that nobody owns and a copy still uses."""
        self._lives: list[Live] = []
        self._to_come: list[Kind] = []
        self._rows: list[Live] = []
        """The rows of the step that was begun behind the latest one."""
        self._begun: list[Live] = []
        """Those of them that go on."""
        self._under_way: list[UnderWay] = []
        self._opened: Any = None
        self.counts: Counter[str] = Counter()
        """What has happened, by name: `HAPPENS` and others."""

    def run(self, num_steps: int) -> None:
        """Make so many steps, and do other things between them."""
        self._join()
        for _ in range(num_steps):
            self._step()
            for _ in range(self._draw.randint(0, 1 if self._begun else 3)):
                self._do_another_thing()

    def _do_another_thing(self) -> None:
        """Do one of the things that can be done now."""
        events: dict[str, tuple[int, Callable[[], bool]]] = {
            "joined": (4, self._join), "aborted": (1, self._abort), "sent": (1, self._send),
            "swap_out": (1, self._swap_out), "swap_in": (2, self._swap_in),
            "ended": (3, self._end_one), "peer closed": (1, self._close_peer),
        }  # fmt: skip
        while events:
            name = self._rarest({name: share for name, (share, _) in events.items()})
            _, event = events.pop(name)
            if event():
                return

    def _rarest(self, shares: dict[str, int]) -> str:
        """Draw one of these things by their shares, the less often the more it has happened."""
        weights = [share / (1 + self.counts[name]) for name, share in shares.items()]
        return self._draw.choices(list(shares), weights)[0]

    def end(self) -> None:
        """End what is under way, compare all that the card holds, and close it, its steps or its
        cache first, in the middle of a step and of copies."""
        while self._under_way:
            self._finish(self._under_way[0])
        decoder: Any = self._runner.decoder
        device = decoder.device
        device.synchronize_all()
        content = content_of(self._cache)
        for live in self._lives:
            if live.is_here:
                for place, block in enumerate(live.table[: live.num_computed // SIZE]):
                    assert (content[:, :, block] == live.kind.blocks[place]).all()
        for _ in range(3):  # in any order, a step's work may all have run
            self._step()
            if device.num_done < device.num_queued:
                self.counts["closed in mid-step"] += 1
                break
        self._send()
        self.counts["closed in mid-copy"] += bool(self._under_way)
        closes = [decoder.close, self._cache.close]
        self._draw.shuffle(closes)
        _call_all([*closes, self._peer.close])

    # --- blocks ---------------------------------------------------------------------------------

    def _grow(self, live: Live, num_tokens: int) -> bool:
        """Give a request blocks for so many tokens; return whether there were enough."""
        wanted = blocks_for(num_tokens, SIZE) - len(live.table)
        if wanted > len(self._free):
            return False
        live.table += [self._free.pop() for _ in range(wanted)]
        return True

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._used[block]:
                self._left.add(block)
            else:
                self._free.append(block)

    def _begin(
        self, blocks: Sequence[int], end: Callable[[], None], swap: CopyUnderWay | None = None,
        *, is_from_peer: bool = False,
    ) -> None:  # fmt: skip
        self._used.update(blocks)
        self._under_way.append(UnderWay(list(blocks), end, swap, is_from_peer))

    def _finish(self, one: UnderWay) -> None:
        while one.swap is not None and not one.swap.is_done():
            self._thread.turn()
        self._under_way.remove(one)
        self._used.subtract(one.blocks)
        ended = [block for block in one.blocks if block in self._left and not self._used[block]]
        self._left.difference_update(ended)
        self._free += ended
        one.end()

    def _end_one(self) -> bool:
        if not self._under_way:
            return False
        self._finish(self._draw.choice(self._under_way))
        self.counts["ended"] += 1
        return True

    # --- requests -------------------------------------------------------------------------------

    def _join(self) -> bool:
        if len(self._lives) >= MOST_SEATED:
            return False
        if not self._to_come:
            self._to_come = self._draw.sample(self._kinds, len(self._kinds))
        live = Live(kind := self._to_come.pop(), list(kind.prompt))
        self._lives.append(live)
        if self._draw.random() < 0.5:
            self._land(live)
        self.counts["joined"] += 1
        return True

    def _abort(self) -> bool:
        if len(self._lives) < 2:
            return False
        self._leave(self._draw.choice(self._lives))
        self.counts["aborted"] += 1
        return True

    def _leave(self, live: Live) -> None:
        self._lives.remove(live)
        self._release(live.table)
        if live.is_here and live.host:
            self._host += live.host

    # --- steps ----------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._draw.random() < 0.5:
            self._thread.turn()
        for one in list(self._under_way):
            if one.swap is not None and one.swap.is_done():
                self._finish(one)
        begun = [live for live in self._begun if live in self._lives]
        if begun and self._draw.random() < 0.9:
            self._execute([(live, 1, []) for live in begun], begun)
            return
        here = [live for live in self._lives if live.is_here and not live.host]
        if not here:  # all wait for copies, or are in host memory, or nobody is there
            self._end_one()
            self._swap_in()
            self._join()
            here = [live for live in self._lives if live.is_here and not live.host]
        parts = self._parts(here) if here else []
        chosen = [part for part in parts if self._grow(part[0], _end(part))]
        if chosen:
            self._execute(chosen, [])
            if all(live.num_computed < len(live.tokens) - 1 for live, *_ in chosen):
                self._after_chunks(self._draw.choice(chosen)[0])

    def _after_chunks(self, live: Live) -> None:
        """Do what could go wrong where the card has not computed a request's chunk: its blocks
        leave, or are another's, or more chunks follow, whose rows overwrite older ones."""
        name = self._rarest(dict.fromkeys(AFTER_CHUNKS, 1))
        if name == "more chunks":
            for left in (2, 1):
                top = min(16, (live.num_to_compute - 1) // left)
                if top > 0 and self._grow(live, live.num_computed + top):
                    self._execute([(live, self._draw.randint(1, top), [])], [], is_told=False)
                    self.counts[name] += left == 1
            return
        if name == "swapped unread":
            has_begun = self._swap_out(live)
        elif name == "sent unread":
            has_begun = self._send(live)
        else:
            self._leave(live)
            has_begun = self._draw.random() < 0.5 and self._swap_in()
            if not has_begun:
                kind = self._draw.choice([kind for kind in self._kinds if len(kind.prompt) > SIZE])
                self._lives.append(live := Live(kind, list(kind.prompt)))
                has_begun = self._land(live)
        self.counts[name] += has_begun
        if has_begun and self._draw.random() < 0.6:
            self._finish(self._under_way[-1])

    def _parts(self, here: list[Live]) -> list[tuple[Live, int, list[int]]]:
        """Return what a step computes of these requests: tokens, and drafts behind them.

        It decodes, with or without drafts, or computes chunks of prompts, or all of that.
        """
        decoding = [live for live in here if live.decodes]
        others = [live for live in here if not live.decodes]
        long = [live for live in others if live.num_to_compute > 1]
        shares = {
            "gone on": 4 * bool(decoding), "drafts": 3 * bool(decoding), "chunks": 3 * bool(long),
            "mixed": 2 * bool(others),
        }  # fmt: skip
        name = self._rarest({one: share for one, share in shares.items() if share})
        if name == "gone on":  # by the step behind it
            return [(live, 1, []) for live in decoding]
        self.counts[name] += 1
        if name == "drafts":
            return [(live, 1, self._drafts(live)) for live in decoding]
        if name == "chunks":
            tops = [(live, min(16, live.num_to_compute - 1)) for live in long]
            return [
                (live, self._draw.choice([top, self._draw.randint(1, top)]), [])
                for live, top in tops
            ]
        chunks = [(live, self._chunk(live), list[int]()) for live in others]
        return [*chunks, *((live, 1, self._drafts(live)) for live in decoding)]

    def _chunk(self, live: Live) -> int:
        most = min(16, live.num_to_compute)
        return most if self._draw.random() < 0.5 else self._draw.randint(1, most)

    def _drafts(self, live: Live) -> list[int]:
        """Return drafts, all of them right ones or all but the last."""
        most = MOST_DRAWN - live.num_drawn - 1
        if most < 1 or self._draw.random() < 0.2:
            return []
        drafts = live.kind.tokens[live.num_drawn :][: self._draw.randint(1, min(3, most))]
        if self._draw.random() < 0.5:
            drafts[-1] = (drafts[-1] + 1) % self._runner.vocab_size
        return drafts

    def _execute(
        self, parts: list[tuple[Live, int, list[int]]], begun: list[Live], *, is_told: bool = True
    ) -> None:
        batch = batch_of([live.entry(count, drafts) for live, count, drafts in parts])
        going: list[int] = []
        if batch.is_plain and all(live.decodes for live, *_ in parts):
            going = [
                place for place, (live, *_) in enumerate(parts)
                if self._grow(live, live.num_computed + 2)
            ]  # fmt: skip
        if going:
            batch = batch_of([live.entry(1) for live, *_ in parts])  # with the blocks it was given
            batch.going_on = np.array(going, np.int64)
        if begun:
            batch.continues = np.array([self._rows.index(live) for live in begun], np.int64)
        results = self._runner.execute(batch, self._handoff(parts) if is_told else None)
        self._begun = []
        if batch.has_gone_on:
            self._rows = [parts[place][0] for place in going]
            left = [parts[place][0] for place in results.left_behind]
            self._begun = [live for live in self._rows if live not in left]
        self.counts["gone on"] += bool(begun)
        self.counts["left behind"] += len(results.left_behind)
        for (live, count, drafts), drawn in zip(parts, results, strict=True):
            live.take(drawn, count)
            if drafts and drawn is not None:
                num_accepted = len(drawn.token_ids) - 1
                self.counts["accepted"] += num_accepted
                self.counts["refused"] += len(drafts) - num_accepted
            if live.num_drawn >= MOST_DRAWN:
                self._leave(live)
                self.counts["answered"] += 1

    # --- copies ---------------------------------------------------------------------------------

    def _handoff(self, parts: list[tuple[Live, int, list[int]]]) -> OnLayer | None:
        """Return what a step tells of its layers, if it does: a request's whole blocks leave.

        A thread of the connector may have seen them leave before the step's tokens are read.
        """
        if self._draw.random() < (0.6 if all(live.decodes for live, *_ in parts) else 0.3):
            return None
        num_layers = self._runner.layout.num_layers
        able = [(live, (live.num_computed + count) // SIZE) for live, count, _ in parts]
        able = [(live, whole) for live, whole in able if 0 < num_layers * whole <= len(self._slots)]
        filling = [(live, whole) for live, whole in able if whole > live.num_computed // SIZE]
        if not able:
            return _ignored
        live, whole = self._draw.choice(filling or able)
        blocks, waits = np.array(live.table[:whole]), list[Callable[[], None]]()

        def on_layer(layer: int) -> None:
            waits.extend(self._send_layer(live, layer, blocks))
            if layer == num_layers - 1:
                self._draw.shuffle(waits)
                self._begin(blocks.tolist(), partial(_call_all, waits))
                self.counts["handed off"] += 1
                if self._draw.random() < 0.6:
                    self._finish(self._under_way[-1])

        return on_layer

    def _send(self, wanted: Live | None = None) -> bool:
        """Send a request's whole blocks, which a chunk may have queued just now."""
        able = [live for live in self._lives if live.is_here and live.table]
        able = [live for live in able if live.num_computed >= SIZE and wanted in (None, live)]
        num_layers = self._runner.layout.num_layers
        if not able:
            return False
        live = self._draw.choice(able)
        blocks = np.array(live.table[: live.num_computed // SIZE])
        if len(self._slots) < num_layers * len(blocks):
            return False
        layers = [self._send_layer(live, layer, blocks) for layer in range(num_layers)]
        waits = [wait for waits in layers for wait in waits]
        self._draw.shuffle(waits)
        self._begin(blocks.tolist(), partial(_call_all, waits))
        self.counts["sent"] += 1
        return True

    def _send_layer(self, live: Live, layer: int, blocks: np.ndarray) -> list[Callable[[], None]]:
        """Begin to sum blocks, after which another cache reads them, and to copy them into the
        ring; return what waits for each."""
        slots = np.array([self._slots.pop() for _ in blocks])
        right = np.stack([one[layer] for one in live.kind.blocks[: len(blocks)]], axis=1)
        summed = self._pool.begin_sums(layer, blocks)
        moved = self._pool.begin_out(layer, blocks, slots)
        return [
            partial(_check_sums, summed, right),
            partial(self._check_out, moved, slots, right),
        ]

    def _check_out(self, moved: Any, slots: np.ndarray, right: np.ndarray) -> None:
        moved.wait()
        assert (self._ring[:, slots] == right).all()
        self._ring[:, slots] = 0xFF
        self._slots += slots.tolist()

    def _land(self, live: Live) -> bool:
        """Let the prompt's whole blocks come through the ring, or from the other cache, if it has
        some and there is room."""
        count, num_layers = (len(live.tokens) - 1) // SIZE, self._runner.layout.num_layers
        if not count or count * num_layers > len(self._slots) or not self._grow(live, count * SIZE):
            return False
        live.is_here = False
        blocks = np.array(live.table)
        name = self._rarest({"from peer": 1, "from ring": 1})
        queue, is_summed = self._draw.randrange(4), self._draw.random() < 0.5
        ends: list[Callable[[], None]] = []
        for layer in range(num_layers):
            right = np.stack([one[layer] for one in live.kind.blocks[:count]], axis=1)
            if name == "from peer":
                ends.append(self._from_peer(live, layer, blocks, queue, is_summed, right))
            else:
                ends.append(self._from_ring(layer, blocks, right))

        def end() -> None:
            _call_all(ends)
            live.is_here, live.num_computed = True, count * SIZE

        self._begin(blocks.tolist(), end, is_from_peer=name == "from peer")
        self.counts[name] += 1
        return True

    def _from_ring(self, layer: int, blocks: np.ndarray, right: np.ndarray) -> Callable[[], None]:
        slots = np.array([self._slots.pop() for _ in blocks])
        self._ring[:, slots] = right
        moved = self._pool.begin_in(layer, slots, blocks)

        def end() -> None:
            moved.wait()
            self._ring[:, slots] = 0xFF
            self._slots.extend(slots.tolist())

        return end

    def _from_peer(
        self, live: Live, layer: int, blocks: np.ndarray, queue: int, is_summed: bool,
        right: np.ndarray,
    ) -> Callable[[], None]:  # fmt: skip
        if self._opened is None:
            peer = self._peer.card_pool
            descriptor = peer.export()
            self._opened = self._pool.open(descriptor, peer.shared_bytes, peer.num_blocks)
            os.close(descriptor)
        before = self._kinds[: self._kinds.index(live.kind)]
        first = sum(len(kind.blocks) for kind in before)
        moved = self._pool.begin_copy(
            self._opened, layer, first + np.arange(len(blocks)), blocks, queue=queue,
            is_behind_steps=layer == 0, is_summed=is_summed,
        )  # fmt: skip

        return partial(_check_sums if is_summed else _ended, moved, right)

    def _close_peer(self) -> bool:
        """Let go of the other cache while blocks are copied out of it, if any are."""
        if self._opened is None or not any(one.is_from_peer for one in self._under_way):
            return False
        self._opened.close()
        self._opened = None
        self.counts["peer closed"] += 1
        return True

    def _swap_out(self, wanted: Live | None = None) -> bool:
        able = [live for live in self._lives if live.is_here and live.num_computed]
        able = [live for live in able if not live.host and wanted in (None, live)]
        if not able:
            return False
        live = self._draw.choice(able)
        count = blocks_for(live.num_computed, SIZE)
        if len(self._host) < count:
            return False
        live.host = [self._host.pop() for _ in range(count)]
        self._swap(live, live.table[:count], CopyKind.SWAP_OUT)
        self._release(live.table)
        live.table = []
        return True

    def _swap_in(self) -> bool:
        able = [live for live in self._lives if live.is_here and live.host]
        if not able or not self._grow(live := self._draw.choice(able), SIZE * len(live.host)):
            return False
        self._swap(live, live.table, CopyKind.SWAP_IN)
        return True

    def _swap(self, live: Live, blocks: list[int], kind: CopyKind) -> None:
        host, whole, live.is_here = live.host, live.num_computed // SIZE, False
        self._begun = [one for one in self._begun if one is not live]
        copy = self._runner.begin_copy(CacheCopy(kind, list(blocks), host))

        def end() -> None:
            live.is_here = True
            if kind is CopyKind.SWAP_OUT:
                for place, right in zip(host, live.kind.blocks[:whole], strict=False):
                    assert (self._runner.host_kv[:, :, place] == right).all()
            if kind is CopyKind.SWAP_IN or live not in self._lives:
                self._runner.host_kv[:, :, host] = 0xFF
                self._host.extend(host)
                live.host = []

        self._begin(blocks, end, copy)
        self.counts[kind.value] += 1


def _end(part: tuple[Live, int, list[int]]) -> int:
    live, count, drafts = part
    return live.num_computed + count + len(drafts)


def _call_all(ends: Sequence[Callable[[], None]]) -> None:
    for end in ends:
        end()


def _ended(moved: Any, _: np.ndarray) -> None:
    assert moved.wait() is None


def _check_sums(moved: Any, right: np.ndarray) -> None:
    found = moved.wait()
    assert found.tolist() == [[bytes_sum(piece) for piece in pieces] for pieces in right]


def _ignored(_: int) -> None:
    """Take a layer that can be sent."""
