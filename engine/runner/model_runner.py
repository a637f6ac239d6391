"""Executes planned steps: tokens in, drawn tokens out, KV in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.blocks import blocks_for
from common.kv_layout import KVLayout
from common.request import SamplingParams
from engine.core.plan import (
    SampledToken,
    SampleInput,
    ScheduledSequence,
    SequencesFailed,
)
from engine.runner.decoder import Decoder
from engine.runner.flat_batch import BatchLimits, flatten
from engine.runner.kv_cache import KVCache
from engine.runner.sampler import BadLogits, Sampler

_SAMPLED_ROWS = 64
"""Most rows of logits held at once: with a vocabulary of 152,000, 39 MB."""


class ModelRunner:
    """One model on one KV cache (`engine.core.plan.Runner`). One thread owns it."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        limits: BatchLimits,
        eos_token_ids: frozenset[int],
        attention_backend: str,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.attention_backend = attention_backend
        self.max_model_len = limits.max_len
        self.vocab_size = limits.vocab_size
        self._decoder = decoder
        self._cache = cache
        self._limits = limits
        self._sampler = Sampler(limits.vocab_size)

    @property
    def layout(self) -> KVLayout:
        """Shape and identity of the cache's blocks."""
        return self._cache.layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, ids 0 to `num_blocks - 1`."""
        return self._cache.num_blocks

    @property
    def kv_bytes(self) -> np.ndarray:
        """The cache as a transfer sees it, writable: `[num_layers, 2, num_blocks, piece_bytes]`.

        Its own memory on a CPU; elsewhere a mirror, see `stage_out` and `stage_in`.
        """
        return self._cache.host_bytes

    def stage_out(self, block_ids: Sequence[int]) -> None:
        """Make what was computed in these blocks readable in `kv_bytes`."""
        self._cache.stage_out(block_ids)

    def stage_in(self, block_ids: Sequence[int]) -> None:
        """Make what was written to these blocks in `kv_bytes` part of the cache."""
        self._cache.stage_in(block_ids)

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """Compute the batch's tokens and draw where asked; one entry per sequence, in order.

        `InternalError` when the batch is outside what the runner was sized for; `SequencesFailed`
        when some entries' logits are not finite.
        """
        if not batch:
            return []
        flat = flatten(batch, self._limits)
        hidden = self._decoder.begin(flat)
        for index in range(self._decoder.num_layers):
            self._decoder.run_layer(index, hidden)
        inputs = [sequence.sample for sequence in batch if sequence.sample is not None]
        entries = [i for i, sequence in enumerate(batch) if sequence.sample is not None]
        results: list[SampledToken | None] = [None] * len(batch)
        bad: list[int] = []
        for first in range(0, len(inputs), _SAMPLED_ROWS):
            part = slice(first, first + _SAMPLED_ROWS)
            drawn: Sequence[SampledToken | None]
            try:
                logits = self._decoder.logits(hidden, flat.sampled_rows[part])
                drawn = self._sampler.sample(logits, inputs[part])
            except BadLogits as error:
                drawn = error.sampled
                bad += [entries[first + row] for row in error.row_indices]
            for entry, token in zip(entries[part], drawn, strict=True):
                results[entry] = token
        if bad:
            raise SequencesFailed("not finite: logits", tuple(bad), tuple(results))
        return results

    def warm_up(self) -> None:
        """Compile or load every kernel, and touch every weight, before the first request.

        Computes a few tokens in the first blocks, so nothing may be cached there yet.
        """
        length = min(32, self.max_model_len)
        table = range(blocks_for(length, self.layout.block_size))
        for params in (
            SamplingParams(max_tokens=1, temperature=0.0, logprobs=1),
            SamplingParams(
                max_tokens=1, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01,
                repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
            ),
        ):  # fmt: skip
            sample = SampleInput(params, 0, [0], [])
            self.execute([ScheduledSequence(0, [0] * length, 0, table, sample)])
            self.execute([ScheduledSequence(0, [0], length - 1, table, sample)])
