"""The MTP layer on CPU kernels, beside a `NumbaDecoder`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.runner.cache.kv_cache import KVCache
from engine.runner.cpu.decoder import NumbaDecoder
from engine.runner.cpu.layer_weights import NONE_1D, NONE_2D, load_layer
from engine.runner.cpu.packed_weights import (
    PackedPlan,
    SharedWeights,
    layer_plans,
    pack_privately,
)
from engine.runner.flat_batch import FlatBatch
from engine.runner.kernels.layer import MtpEntry, enter_mtp, leave_mtp
from engine.runner.kernels.lock import KERNEL_LOCK
from engine.runner.kernels.products.linear import gather_columns
from engine.runner.mtp.draft_source import (
    DRAFT_HEAD,
    EMBEDDING_PROJECTION,
    STATE_PROJECTION,
    DraftSource,
)
from engine.runner.mtp.mtp_weights import MtpWeights


class NumbaMtp:
    """A `draft_step.MtpLayer`.

    Of rows without a draft after them only keys and values are needed, so nothing else is computed
    for them: a prefill chunk costs a fifth of a layer.

    The layer's weights, and those of a draft head of its own, are in groups of 8 bits
    (`draft_source`).
    """

    def __init__(
        self,
        weights: MtpWeights,
        decoder: NumbaDecoder,
        cache: KVCache,
        layer_index: int,
        packed_folder: Path | None,
    ) -> None:
        """Load the layer; `layer_index` is its layer of the cache.

        Below `packed_folder` are the packed weights that nodes of this machine share (None: private
        memory).
        """
        self._index = layer_index
        self._decoder, self._spec = decoder, decoder.spec
        self._output_norm = weights.output_norm()
        self._recurses_on_normed = weights.recurses_on_normed
        self._draft_ids = weights.draft_token_ids
        self._num_drafted = self._spec.vocab_size
        if self._draft_ids is not None:
            self._num_drafted = len(self._draft_ids)
        files = DraftSource(weights, self._spec.hidden_size, self._drafted_head_rows)
        made = [EMBEDDING_PROJECTION, STATE_PROJECTION]
        if self._draft_ids is not None:
            made.append(DRAFT_HEAD)
        plans = [PackedPlan(name, (name,)) for name in made]
        plans += layer_plans(self._spec, weights.layer_prefix)
        with KERNEL_LOCK:
            if packed_folder is None:
                packed = pack_privately(files, plans, decoder.memory, with_bytes=decoder.with_bytes)
            else:
                shared = SharedWeights(files, plans, packed_folder)
                packed = shared.map(with_bytes=decoder.with_bytes)
        self.shared_bytes = 0
        if packed_folder is not None:
            self.shared_bytes = sum(weight.data.nbytes for weight in packed.values())
        # Kept: their tables hold addresses in them.
        token, own = self._projections = packed[EMBEDDING_PROJECTION], packed[STATE_PROJECTION]
        bias = weights.projection_bias()
        entry = MtpEntry(
            embedding_norm=weights.embedding_norm(),
            hidden_norm=weights.hidden_norm(),
            token=token.table,
            hidden=own.table,
            bias=NONE_1D if bias is None else bias,
        )
        self._entry = tuple(entry)
        self._head = packed.get(DRAFT_HEAD, decoder.head)
        self._layer = load_layer(
            files, weights.layer_prefix, self._spec, packed, cache.layout.dtype
        )
        self.use_cache(cache)
        buffers, shape = decoder.step_buffers, decoder.shape
        width = self._spec.hidden_size
        self._entered = buffers.rows(shape.num_tokens, width)
        self._inputs = buffers.rows(shape.num_tokens, width)
        self._outputs = buffers.rows(shape.num_seqs, width)
        self._queries = buffers.rows(shape.num_seqs, self._spec.qkv_size)
        self._logits = buffers.rows(shape.num_seqs, self._num_drafted)
        self._states = NONE_2D

    def _drafted_head_rows(self) -> np.ndarray:
        """Return the rows of the target's head for the tokens that can be drafted."""
        rows = np.empty((self._num_drafted, self._spec.hidden_size), np.float32)
        gather_columns(self._decoder.head.table, self._draft_ids, rows)
        return rows

    def use_cache(self, cache: KVCache) -> None:
        """Keep keys and values in `cache` from now on."""
        (keys, values), tables = cache.slots()[self._index], self._layer.tables
        self._whole = self._decoder.of_layer(tables, keys, values, self._spec.rope)
        left_out = self._spec.num_heads * self._spec.head_dim
        tables = tables._replace(qkv=tables.qkv[1:], qkv_bias=tables.qkv_bias[left_out:])
        self._without_queries = self._decoder.of_layer(tables, keys, values, self._spec.rope)

    def first_drafts(self, hidden: np.ndarray, rows: np.ndarray, batch: FlatBatch) -> np.ndarray:
        last, states = batch.sampled_rows, self._entered.first(len(rows))
        # The inputs are made of the states later: until then their memory is free.
        self._decoder.apply_final_norm(self._inputs.copy_rows(hidden, rows), states)
        if not len(last):
            self._enter(states, batch, has_queries=False)
            return np.zeros(0, np.int64)
        inputs, qkv = self._enter(states, batch)
        sequences = np.searchsorted(batch.row_starts, last, side="right") - 1
        return self._leave(
            self._outputs.copy_rows(inputs, last),
            self._queries.copy_rows(qkv, last),
            batch.positions[last],
            batch.block_tables[sequences],
        )

    def next_drafts(self, kept: np.ndarray, batch: FlatBatch) -> np.ndarray:
        inputs, qkv = self._enter(self._entered.copy_rows(self._states, kept), batch)
        return self._leave(inputs, qkv, batch.positions, batch.block_tables)

    def _enter(
        self, states: np.ndarray, batch: FlatBatch, *, has_queries: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the layer's inputs `[rows, hidden_size]`, and queries ready for attention."""
        decoder, spec = self._decoder, self._spec
        left_out = 0 if has_queries else spec.num_heads * spec.head_dim
        rows, shared = len(states), decoder.buffers
        inputs, qkv = self._inputs.first(rows), shared.qkv.first(rows, spec.qkv_size - left_out)
        with KERNEL_LOCK:
            enter_mtp(
                batch.token_ids,
                decoder.embedding.table,
                states,
                self._entry,
                self._whole if has_queries else self._without_queries,
                batch.positions,
                batch.slots,
                inputs,
                shared.of_layer(rows, qkv),
            )
        return inputs, qkv

    def _leave(
        self, outputs: np.ndarray, qkv: np.ndarray, positions: np.ndarray, block_tables: np.ndarray
    ) -> np.ndarray:
        """Return drafts after rows that are each a sequence's last; `outputs` are layer inputs."""
        decoder, count = self._decoder, len(outputs)
        shared, logits = decoder.buffers, self._logits.first(count)
        work = decoder.plan_attention(np.arange(count + 1), positions, block_tables)
        with KERNEL_LOCK:
            leave_mtp(
                outputs,
                self._whole,
                work,
                self._output_norm,
                self._head.table,
                shared.of_layer(count, qkv),
                logits,
            )
        self._states = shared.normed.first(count) if self._recurses_on_normed else outputs
        best: np.ndarray = logits.argmax(axis=1)
        return best if self._draft_ids is None else self._draft_ids[best]
