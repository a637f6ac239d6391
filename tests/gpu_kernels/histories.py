"""Random histories of a node's runner and cache on a card, each of which has one right outcome.

Requests of a few kinds come and leave at any time. What a kind's request draws, and the bytes of
its keys and values, are known from a run in which the card does everything at once, in the order
of the program. So every answer, every block that leaves the card and all that lies there at the end
can be compared, whatever else happened: a difference is a wait or an event that is missing.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np

from common.kv.blocks import blocks_for
from common.request import SamplingParams, TokenLogprobs
from engine.core.blocks.cache_copy import CacheCopy, CopyKind, CopyUnderWay
from engine.core.runner_contract import (
    DrawnTokens,
    OnLayer,
    SampleInput,
    ScheduledSequence,
)
from engine.core.step.step_batch import batch_of
from engine.runner.gpu.cache.pool import GpuCache
from engine.runner.model_runner import ModelRunner
from tests.support.engine.fake_card import bytes_sum
from tests.support.engine.moved_blocks import new_ring

SIZE = 16
"""Tokens of a block."""
MOST_DRAWN = 8
MOST_SEATED = 4
NUM_BLOCKS, NUM_SLOTS, NUM_HOST_BLOCKS = 13, 24, 8
"""Few: what one request leaves is taken by the next one while the card still has work with it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A request and its one answer. `blocks` are those that it fills, `[layers, 2, piece]`."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    blocks: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Live:
    """A request that is on the node. `is_here`: its blocks are, and no copy moves them."""

    kind: Kind
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_here: bool = True

    @property
    def num_drawn(self) -> int:
        return len(self.tokens) - len(self.kind.prompt)

    @property
    def decodes(self) -> bool:
        return self.num_computed == len(self.tokens) - 1 and self.num_drawn > 0

    def entry(self, count: int, drafts: Sequence[int] = ()) -> ScheduledSequence:
        """The next `count` known tokens, and drafts behind the last one."""
        start, prompt = self.num_computed, self.kind.prompt
        end = start + count
        sample = None
        if end == len(self.tokens):
            drawn = self.tokens[len(prompt) :]
            sample = SampleInput(self.kind.params, len(drawn), prompt, drawn)
        return ScheduledSequence(
            0, [*self.tokens[start:end], *drafts], start, self.table, sample, len(drafts),
            next_token_id=None if sample else self.tokens[end],
        )  # fmt: skip

    def take(self, drawn: DrawnTokens | None, count: int) -> None:
        """Compare what a step drew with the one answer."""
        if drawn is None:
            self.num_computed += count
            return
        first, end = self.num_drawn, self.num_drawn + len(drawn.token_ids)
        assert list(drawn.token_ids) == self.kind.tokens[first:end]
        assert list(drawn.logprobs) == self.kind.logprobs[first:end]
        self.tokens += drawn.token_ids
        self.num_computed = len(self.tokens) - 1


@dataclass(eq=False, slots=True)
class UnderWay:
    """Work beside the steps that uses these blocks. `end` waits for it; `swap` is looked at."""

    blocks: list[int]
    end: Callable[[], None]
    swap: CopyUnderWay | None = None


def content_of(cache: Any) -> np.ndarray:
    """What a card holds `[layers, 2, blocks, piece_bytes]`, for a test to look at."""
    layout = cache.layout
    size = cache.num_blocks * layout.block_bytes
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(cache.pool.address))
    return flat.reshape(layout.pool_shape(cache.num_blocks))


def answered(runner: ModelRunner, kinds: Sequence[Kind]) -> list[Kind]:
    """Return the kinds with their answers, by a runner whose card does everything at once."""
    width = blocks_for(max(len(kind.prompt) for kind in kinds) + MOST_DRAWN, SIZE)
    lives = [
        Live(kind, list(kind.prompt), list(range(width * place, width * (place + 1))))
        for place, kind in enumerate(kinds)
    ]
    for live in lives:
        [drawn] = runner.execute(batch_of([live.entry(len(live.tokens))]))
        _add(live, drawn)
    for _ in range(MOST_DRAWN - 1):
        for live, one in zip(
            lives, runner.execute(batch_of([live.entry(1) for live in lives])), strict=True
        ):
            _add(live, one)
    content = content_of(runner.cache)
    for live in lives:
        full = live.table[: live.num_computed // SIZE]
        live.kind.blocks.extend(content[:, :, block].copy() for block in full)
    return list(kinds)


def _add(live: Live, drawn: DrawnTokens | None) -> None:
    assert drawn is not None
    live.kind.tokens.extend(drawn.token_ids)
    live.kind.logprobs.extend(drawn.logprobs)
    live.take(drawn, 0)


def peer_of(runner: ModelRunner, kinds: Sequence[Kind]) -> GpuCache:
    """Return another node's cache that holds every kind's blocks, one kind after the other."""
    layout = runner.layout
    blocks = [block for kind in kinds for block in kind.blocks]
    device: Any = InterpretedDevice()
    peer = GpuCache(device, InterpretedKernel, 1, layout, len(blocks) * layout.block_bytes)
    content_of(peer)[:] = np.stack(blocks, axis=2)
    return peer


class History:
    """Does one thing after the other, as `seed` draws them, and compares as it goes."""

    def __init__(self, runner: ModelRunner, kinds: Sequence[Kind], seed: int) -> None:
        self._runner, self._kinds, self._draw = runner, kinds, random.Random(seed)
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
        self._rows: list[Live] = []
        """The rows of the step that was begun behind the latest one."""
        self._begun: list[Live] = []
        """Those of them that go on."""
        self._under_way: list[UnderWay] = []
        self._opened: Any = None
        self.counts: Counter[str] = Counter()
        """What has happened, by name."""

    def run(self, num_events: int) -> None:
        """Do so many things."""
        events: list[tuple[int, Callable[[], None]]] = [
            (12, self._step), (4, self._join), (1, self._abort), (2, self._send),
            (1, self._swap_out), (2, self._swap_in), (2, self._end_one), (1, self._close_peer),
        ]  # fmt: skip
        weights = [weight for weight, _ in events]
        for _ in range(num_events):
            [(_, event)] = self._draw.choices(events, weights)
            event()

    def end(self) -> None:
        """End what is under way, compare all that the card holds, and close it, its steps or its
        cache first, in the middle of a step and of copies."""
        while self._under_way:
            self._finish(self._under_way[0])
        decoder: Any = self._runner.decoder
        decoder.device.synchronize_all()
        content = content_of(self._cache)
        for live in self._lives:
            if live.is_here:
                for place, block in enumerate(live.table[: live.num_computed // SIZE]):
                    assert (content[:, :, block] == live.kind.blocks[place]).all()
        self._step()
        self._send()
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
        self, blocks: Sequence[int], end: Callable[[], None], swap: CopyUnderWay | None = None
    ) -> None:
        self._used.update(blocks)
        self._under_way.append(UnderWay(list(blocks), end, swap))

    def _finish(self, one: UnderWay) -> None:
        while one.swap is not None and not one.swap.is_done():
            pass
        self._under_way.remove(one)
        self._used.subtract(one.blocks)
        ended = [block for block in one.blocks if block in self._left and not self._used[block]]
        self._left.difference_update(ended)
        self._free += ended
        one.end()

    def _end_one(self) -> None:
        if self._under_way:
            self._finish(self._draw.choice(self._under_way))

    # --- requests -------------------------------------------------------------------------------

    def _join(self) -> None:
        if len(self._lives) < MOST_SEATED:
            live = Live(kind := self._draw.choice(self._kinds), list(kind.prompt))
            self._lives.append(live)
            if self._draw.random() < 0.5:
                self._land(live)

    def _abort(self) -> None:
        if len(self._lives) > 1:
            self._leave(self._draw.choice(self._lives))
            self.counts["aborted"] += 1

    def _leave(self, live: Live) -> None:
        self._lives.remove(live)
        self._release(live.table)
        if live.is_here and live.host:
            self._host += live.host

    # --- steps ----------------------------------------------------------------------------------

    def _step(self) -> None:
        for one in list(self._under_way):
            if one.swap is not None and one.swap.is_done():
                self._finish(one)
        begun = [live for live in self._begun if live in self._lives]
        if begun and self._draw.random() < 0.8:
            self._execute([(live, 1, []) for live in begun], begun)
            return
        here = [live for live in self._lives if live.is_here and not live.host]
        if not here:  # all wait for copies, or are in host memory, or nobody is there
            self._end_one()
            self._swap_in()
            self._join()
            return
        is_plain = self._draw.random() < 0.6 and any(live.decodes for live in here)
        parts = [self._part(live, is_plain) for live in here]
        chosen = [part for part in parts if part is not None and self._grow(part[0], _end(part))]
        if chosen:
            self._execute(chosen, [])

    def _part(self, live: Live, is_plain: bool) -> tuple[Live, int, list[int]] | None:
        """Return what a step may compute of a request: tokens, and drafts behind them."""
        if live.decodes:
            most = MOST_DRAWN - live.num_drawn - 1
            if is_plain or most < 1 or self._draw.random() < 0.3:
                return live, 1, []
            drafts = live.kind.tokens[live.num_drawn :][: self._draw.randint(1, min(3, most))]
            if self._draw.random() < 0.5:
                drafts[-1] = (drafts[-1] + 1) % self._runner.vocab_size
            return live, 1, drafts
        if is_plain:
            return None
        return live, self._draw.randint(1, min(16, len(live.tokens) - live.num_computed)), []

    def _execute(self, parts: list[tuple[Live, int, list[int]]], begun: list[Live]) -> None:
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
        results = self._runner.execute(batch, self._handoff(parts))
        self._begun = []
        if batch.has_gone_on:
            self._rows = [parts[place][0] for place in going]
            left = [parts[place][0] for place in results.left_behind]
            self._begun = [live for live in self._rows if live not in left]
        self.counts["gone on" if begun else "steps"] += 1
        self.counts["left"] += len(results.left_behind)
        for (live, count, drafts), drawn in zip(parts, results, strict=True):
            live.take(drawn, count)
            self.counts["drafts"] += len(drafts)
            if live.num_drawn >= MOST_DRAWN:
                self._leave(live)
                self.counts["answered"] += 1

    # --- copies ---------------------------------------------------------------------------------

    def _handoff(self, parts: list[tuple[Live, int, list[int]]]) -> OnLayer | None:
        """Return what a step tells of its layers, if it does: a request's whole blocks leave.

        A thread of the connector may have seen them leave before the step's tokens are read.
        """
        if self._draw.random() < (0.6 if all(live.decodes for live, *_ in parts) else 0.1):
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

    def _send(self) -> None:
        """Send a request's whole blocks, which a chunk may have queued just now."""
        able = [live for live in self._lives if live.is_here and live.table]
        able = [live for live in able if live.num_computed >= SIZE]
        num_layers = self._runner.layout.num_layers
        if not able:
            return
        live = self._draw.choice(able)
        blocks = np.array(live.table[: live.num_computed // SIZE])
        if len(self._slots) < num_layers * len(blocks):
            return
        layers = [self._send_layer(live, layer, blocks) for layer in range(num_layers)]
        waits = [wait for waits in layers for wait in waits]
        self._draw.shuffle(waits)
        self._begin(blocks.tolist(), partial(_call_all, waits))
        self.counts["sent"] += 1

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

    def _land(self, live: Live) -> None:
        """Let the prompt's whole blocks come through the ring, or from the other cache."""
        count, num_layers = (len(live.tokens) - 1) // SIZE, self._runner.layout.num_layers
        if not count or count * num_layers > len(self._slots) or not self._grow(live, count * SIZE):
            return
        live.is_here = False
        blocks = np.array(live.table)
        by_peer = self._draw.random() < 0.5
        queue, is_summed = self._draw.randrange(4), self._draw.random() < 0.5
        ends: list[Callable[[], None]] = []
        for layer in range(num_layers):
            right = np.stack([one[layer] for one in live.kind.blocks[:count]], axis=1)
            if by_peer:
                ends.append(self._from_peer(live, layer, blocks, queue, is_summed, right))
            else:
                ends.append(self._from_ring(layer, blocks, right))

        def end() -> None:
            _call_all(ends)
            live.is_here, live.num_computed = True, count * SIZE

        self._begin(blocks.tolist(), end)
        self.counts["from peer" if by_peer else "from ring"] += 1

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

    def _close_peer(self) -> None:
        """Let go of the other cache, whatever is still copied out of it."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
            self.counts["peer closed"] += 1

    def _swap_out(self) -> None:
        able = [live for live in self._lives if live.is_here and live.num_computed]
        if not able:
            return
        live = self._draw.choice(able)
        count = blocks_for(live.num_computed, SIZE)
        if live.host or len(self._host) < count:
            return
        live.host = [self._host.pop() for _ in range(count)]
        self._swap(live, live.table[:count], CopyKind.SWAP_OUT)
        self._release(live.table)
        live.table = []

    def _swap_in(self) -> None:
        able = [live for live in self._lives if live.is_here and live.host]
        if able and self._grow(live := self._draw.choice(able), SIZE * len(live.host)):
            self._swap(live, live.table, CopyKind.SWAP_IN)

    def _swap(self, live: Live, blocks: list[int], kind: CopyKind) -> None:
        host, live.is_here = live.host, False
        self._begun = [one for one in self._begun if one is not live]
        copy = self._runner.begin_copy(CacheCopy(kind, list(blocks), host))

        def end() -> None:
            live.is_here = True
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
