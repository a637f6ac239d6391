"""The model that is distilled from: its text side, its weights, and decoding many texts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.kv.kv_layout import KVLayout
from engine.runner.back_end import StepShape
from engine.runner.cache.kv_cache import KVCache
from engine.runner.cpu.decoder import NumbaDecoder
from engine.runner.flat_batch import FlatBatch
from engine.runner.paddle_import import paddle, set_num_threads
from engine.runner.weights.checkpoint import Checkpoint
from engine.runner.weights.spec.model_spec import read_decoder_spec
from router.text.text_model import TextModel

MAX_SEQUENCE = 512
"""The longest prompt with its answer, in tokens."""
_BLOCK_SIZE = 64
_BLOCKS_PER_SLOT = MAX_SEQUENCE // _BLOCK_SIZE

Choose = Callable[[np.ndarray], np.ndarray]
"""Logits `[rows, vocab_size]` → the token id of each row."""


@dataclass(slots=True)
class Sequence:
    """One text that is being decoded. `states` holds a piece `[rows, hidden_size]` per step."""

    key: str
    token_ids: list[int]
    prompt_len: int
    max_len: int
    num_computed: int = 0
    states: list[np.ndarray] = field(default_factory=list)

    def all_states(self) -> np.ndarray:
        """Return hidden states after the final norm, float16 `[computed tokens, hidden_size]`."""
        return np.concatenate(self.states)


class TargetModel:
    """A Hugging Face folder whose architecture the engine's CPU kernels serve."""

    def __init__(self, folder: Path, num_slots: int, num_threads: int) -> None:
        """Load it with slots for `num_slots` sequences of `MAX_SEQUENCE` tokens.

        Raises `CheckpointError` or `ConfigError` when the engine cannot serve the folder.
        """
        set_num_threads(num_threads)
        paddle.set_device("cpu")
        self.text = TextModel.load(folder, "", 0)
        self.spec = read_decoder_spec(folder)
        self.checkpoint = Checkpoint(folder, self.spec)
        layout = KVLayout(
            model_digest=self.checkpoint.identity()[:32],
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            block_size=_BLOCK_SIZE,
            dtype="float32",
        )
        cache = KVCache(layout, layout.block_bytes * _BLOCKS_PER_SLOT * num_slots)
        shape = StepShape(
            num_tokens=num_slots * MAX_SEQUENCE, num_seqs=num_slots, num_logits_rows=num_slots
        )
        self._decoder = NumbaDecoder(self.spec, self.checkpoint, cache, MAX_SEQUENCE, shape)
        self._final_norm = self.checkpoint.read("model.norm.weight")
        self._num_slots = num_slots

    def decode(self, pending: Iterator[Sequence], choose: Choose) -> Iterator[Sequence]:
        """Continue each of `pending` to `max_len` or an end-of-sequence token, then yield it.

        As many run at a time as there are slots; the next one starts when one ends.
        """
        running: dict[int, Sequence] = {}
        while True:
            for slot in range(self._num_slots):
                if slot not in running and (following := next(pending, None)) is not None:
                    running[slot] = following
            if not running:
                return
            self._step(running, choose)
            for slot, sequence in list(running.items()):
                ended = sequence.token_ids[-1] in self.text.eos_token_ids
                if ended or len(sequence.token_ids) >= sequence.max_len:
                    yield running.pop(slot)

    def _step(self, running: dict[int, Sequence], choose: Choose) -> None:
        """Compute every running sequence's new tokens and append one token to each."""
        batch = _flatten(running)
        hidden = self._decoder.begin(batch)
        for index in range(self._decoder.num_layers):
            self._decoder.run_layer(index, hidden)
        chosen = choose(self._decoder.logits(hidden, batch.sampled_rows))
        states = self._normed(hidden)
        for i, sequence in enumerate(running.values()):
            sequence.states.append(states[batch.row_starts[i] : batch.row_starts[i + 1]])
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(int(chosen[i]))

    def _normed(self, hidden: np.ndarray) -> np.ndarray:
        mean_square = np.mean(np.square(hidden), axis=1, keepdims=True)
        scaled = hidden / np.sqrt(mean_square + self.spec.rms_epsilon) * self._final_norm
        return np.asarray(scaled, np.float16)


def _flatten(running: dict[int, Sequence]) -> FlatBatch:
    """Return the step's rows; slot s owns the blocks from `s * _BLOCKS_PER_SLOT` on."""
    token_ids, positions, slots, row_starts, tables = [], [], [], [0], []
    for slot, sequence in running.items():
        new = np.arange(sequence.num_computed, len(sequence.token_ids))
        token_ids.append(np.array(sequence.token_ids[sequence.num_computed :]))
        positions.append(new)
        slots.append(slot * MAX_SEQUENCE + new)
        row_starts.append(row_starts[-1] + len(new))
        tables.append(np.arange(_BLOCKS_PER_SLOT) + slot * _BLOCKS_PER_SLOT)
    starts = np.array(row_starts, np.int64)
    return FlatBatch(
        token_ids=np.concatenate(token_ids).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        slots=np.concatenate(slots).astype(np.int64),
        row_starts=starts,
        block_tables=np.stack(tables).astype(np.int64),
        sampled_rows=starts[1:] - 1,
    )


def greedy(logits: np.ndarray) -> np.ndarray:
    """Return the likeliest token of each row."""
    return np.asarray(np.argmax(logits, axis=1))


def sampled(seed: int, temperature: float, top_k: int) -> Choose:
    """Return a function that draws from each row's `top_k` likeliest tokens at `temperature`."""
    draw = np.random.default_rng(seed)

    def choose(logits: np.ndarray) -> np.ndarray:
        top_k_here = min(top_k, logits.shape[1])
        candidates = np.argpartition(logits, -top_k_here, axis=1)[:, -top_k_here:]
        scores = np.take_along_axis(logits, candidates, axis=1) / temperature
        best = np.argmax(scores + draw.gumbel(size=scores.shape), axis=1)
        return np.take_along_axis(candidates, best[:, None], axis=1)[:, 0]

    return choose
