"""The largest step of a node, computed once at its start to see how much memory it takes.

Layers use the same buffers one after the other, and those of a kind have the same shapes, so the
first one of each kind (by its MLP or mixture of experts, and its sliding window) shows what every
layer takes. All tokens are equal: those of a mixture go to the same experts, each of which takes
the most that it can. No KV is kept: every position's block is the first one of a small cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.kv.blocks import blocks_for
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence, SequencesFailed
from engine.core.step.step_batch import batch_of
from engine.runner.back_end import StepShape
from engine.runner.decoder import Decoder
from engine.runner.flat_batch import BatchLimits, FlatBatch
from engine.runner.memory_meter import MemoryMeter
from engine.runner.model_runner import ModelRunner
from engine.runner.weights.spec.model_spec import DecoderSpec

_PARAMS = (
    SamplingParams(
        max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=1,
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    ),
    SamplingParams(max_tokens=1, temperature=1.0),
)  # fmt: skip
"""Everything that takes memory while a token is drawn, on the host and on a device, in turns."""


class FirstLayers:
    """A `Decoder` that has the first layer of each kind of another one alone.

    With `most_rows` it computes no layer of steps with more of them. On kernels whose memory does
    not depend on the rows, beside buffers that have been taken before, such a layer takes nothing.
    """

    def __init__(self, decoder: Decoder, spec: DecoderSpec, most_rows: int | None) -> None:
        self._decoder = decoder
        self._most_rows = most_rows
        layers = reversed(range(spec.num_layers))
        first = {(spec.mixture_of(layer), spec.window_of(layer)): layer for layer in layers}
        self._layers = sorted(first.values())
        self.num_layers = len(self._layers)

    def begin(self, batch: FlatBatch) -> Any:
        return self._decoder.begin(batch)

    def run_layer(self, index: int, hidden: Any) -> None:
        if self._most_rows is None or len(hidden) <= self._most_rows:
            self._decoder.run_layer(self._layers[index], hidden)

    def logits(self, hidden: Any, rows: np.ndarray) -> np.ndarray:
        return self._decoder.logits(hidden, rows)


def measured_peak_bytes(
    runner: ModelRunner,
    batches: Sequence[Sequence[ScheduledSequence]],
    meter: MemoryMeter,
    shared_bytes: int,
) -> int:
    """Return the most memory that the process takes while `runner` computes each of `batches`.

    `shared_bytes` of mapped weights are left out, as in `MemoryMeter.peak_bytes`.
    """
    # First a few tokens: what compiling or loading the kernels takes for a moment does not count.
    few = [batches[0][0]]
    _execute(runner, few)
    meter.reset_peak()
    for batch in (few, *batches):
        _execute(runner, batch)
    return meter.peak_bytes(shared_bytes)


def profile_batches(
    shape: StepShape, limits: BatchLimits, num_drafts: int, *, has_longest_context: bool
) -> list[list[ScheduledSequence]]:
    """Return two largest steps: one with as many sequences as possible, one with long chunks.

    Both have `shape.num_tokens` tokens, or as many as so many sequences of the model's length have.
    `has_longest_context`: the chunks of the second are the last ones of their sequences, because
    the attention takes more memory the more keys there are.
    """
    per_seq = 1 + num_drafts
    count = min(shape.num_seqs, max(1, shape.num_tokens // per_seq))
    lengths = [min(per_seq, shape.num_tokens)] * count
    rest = shape.num_tokens - sum(lengths)
    for index in reversed(range(count)):
        longer = min(rest, limits.max_len - lengths[index])
        lengths[index] += longer
        rest -= longer
    decodes = [
        _sequence(index, 0, length, limits, num_drafts if length == per_seq else 0, num_drafts)
        for index, length in enumerate(lengths)
    ]
    chunks: list[ScheduledSequence] = []
    rest = shape.num_tokens
    while rest > 0 and len(chunks) < shape.num_seqs:
        length = min(rest, limits.max_len)
        start = limits.max_len - length if has_longest_context else 0
        chunks.append(_sequence(len(chunks), start, length, limits, 0, num_drafts))
        rest -= length
    return [decodes, chunks]


def _sequence(
    index: int,
    start: int,
    length: int,
    limits: BatchLimits,
    num_drafts: int,
    num_proposals: int,
) -> ScheduledSequence:
    table = [0] * blocks_for(start + length, limits.block_size)
    num_known = start + length - num_drafts
    sample = SampleInput(_PARAMS[index % len(_PARAMS)], 0, [0] * num_known, [])
    return ScheduledSequence(
        0, [0] * length, start, table, sample, num_drafts=num_drafts, num_proposals=num_proposals
    )


def _execute(runner: ModelRunner, batch: Sequence[ScheduledSequence]) -> None:
    # Weights whose logits are not finite are reported when they meet a request.
    with contextlib.suppress(SequencesFailed):
        runner.execute(batch_of(batch))
