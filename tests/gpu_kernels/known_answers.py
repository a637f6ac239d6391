"""Requests whose answers and blocks are known from a run in which the card does everything at once,
in the order of the program."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np

from common.kv.blocks import blocks_for
from common.request import SamplingParams, TokenLogprobs
from engine.core.runner_contract import DrawnTokens, SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.gpu.cache.pool import GpuCache
from engine.runner.model_runner import ModelRunner

SIZE = 16
"""Tokens of a block."""
MOST_DRAWN = 6


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
    def num_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

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
