"""A runner that takes the time of a large model and computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from common.grammar import Grammar
from common.kv.kv_layout import KVLayout
from engine.core.blocks.cache_copy import CacheCopy, CopyUnderWay
from engine.core.runner_contract import (
    DrawnTokens,
    OnLayer,
    OnQueued,
    RunnerResult,
    ScheduledSequence,
    StepCosts,
)

HostMemory = Callable[[int, bool], npt.NDArray[np.uint8] | None]

LAYOUT_8B = KVLayout(
    model_digest="synthetic-8b",
    num_layers=36,
    num_kv_heads=8,
    head_dim=128,
    block_size=64,
    dtype="bfloat16",
)


class PacedRunner:
    """A `node.life.node_parts.LoadedModel` with the KV layout of an 8B model; computes nothing.

    A step of `n` tokens lasts `n / tokens_per_s`. Layer `l` is done after its share of that time,
    as on a device that computes by itself: time spent in `on_layer` is not added. The pool's bytes
    are random and never change.
    """

    layout = LAYOUT_8B
    vocab_size = 32_000
    eos_token_ids = frozenset[int]()
    num_host_blocks = 0
    has_grammars = False
    step_costs = StepCosts((1, 2), (1.0, 2.0))
    pairs_per_token = 0
    device = ""

    def __init__(self, *, tokens_per_s: float, num_blocks: int, host_memory: HostMemory) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = num_blocks * self.layout.block_size
        self._tokens_per_s = tokens_per_s
        size = num_blocks * self.layout.block_bytes
        memory = host_memory(size, True)
        self._pool = np.empty(size, np.uint8) if memory is None else memory
        self._pool.view(np.int64)[:] = np.random.default_rng(1).integers(
            0, 1 << 63, size // 8, dtype=np.int64
        )

    def prepare_grammar(self, grammar: Grammar) -> None:
        """Return None: no request has one."""

    def grammar_statistics(self) -> None:
        """Return None: nothing follows a grammar."""

    memory = None

    @property
    def kv_bytes(self) -> npt.NDArray[np.uint8]:
        """`[num_layers, 2, num_blocks, piece_bytes]`."""
        shape = self.layout.pool_shape(self.num_blocks)
        return self._pool.reshape(shape)

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        """Wait for each layer, then report it."""
        num_tokens = sum(len(entry.token_ids) for entry in batch)
        layer_s = num_tokens / self._tokens_per_s / self.layout.num_layers
        began_at_s = time.monotonic()
        for layer in range(self.layout.num_layers):
            time.sleep(max(began_at_s + (layer + 1) * layer_s - time.monotonic(), 0.0))
            if on_layer is not None:
                on_layer(layer)
        return RunnerResult(None if e.sample is None else DrawnTokens((1,)) for e in batch)

    def warm_up(self) -> None:
        """Do nothing: nothing is compiled."""

    needs_staging = stages_landings = can_go_on = False
    card_pool = None

    def begin_copy(self, copy: CacheCopy) -> CopyUnderWay:
        raise NotImplementedError("the pool is host memory")

    @property
    def host_kv(self) -> np.ndarray:
        raise NotImplementedError("there is no host pool")

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        raise NotImplementedError("there is no host pool")

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        raise NotImplementedError("there is no host pool")
