"""Executes planned steps: tokens in, drawn tokens out, KV in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import numpy as np

from common.errors import InternalError
from common.grammar import Grammar
from common.kv.blocks import blocks_for
from common.kv.kv_layout import KVLayout
from common.kv.memory_plan import MemoryPlan
from common.request import SamplingParams
from engine.core.blocks.cache_copy import CacheCopy, CopyKind, CopyUnderWay
from engine.core.grammar_statistics import GrammarStatistics
from engine.core.runner_contract import (
    DrawnTokens,
    OnLayer,
    OnQueued,
    RunnerResult,
    SampleInput,
    ScheduledSequence,
    SequencesFailed,
    StepCosts,
)
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.back_end import BackEnd, LoadedDecoder, ModelFiles
from engine.runner.cache.contract import Cache
from engine.runner.cache.host_pool import HostBlockArrays
from engine.runner.cpu.compile_once import alone_on_machine, compile_once
from engine.runner.decoder import Decoder
from engine.runner.drawing.draws import MAX_SAMPLED_ROWS, HostDraw, accept_drafts
from engine.runner.drawing.prompt_scores import find_prompt_logprobs
from engine.runner.drawing.sampler import sampled_rows
from engine.runner.drawing.token_rules import AllowedMasks
from engine.runner.drawing.undrawn import why_undrawn
from engine.runner.flat_batch import BatchLimits, FlatBatch, flatten
from engine.runner.grammars.masks import GrammarMasks
from engine.runner.mtp.draft_step import MtpLayer, plan_drafts, run_drafts
from engine.runner.step_costs import DecodeShape, measure_step_costs, unlike_tokens


class ModelRunner:
    """One model on one KV cache, a `runner_contract.Runner`. One thread at a time uses it."""

    def __init__(
        self,
        back_end: BackEnd,
        files: ModelFiles,
        loaded: LoadedDecoder,
        cache: Cache,
        limits: BatchLimits,
        widest: DecodeShape,
        *,
        host_blocks: HostBlockArrays | None = None,
        memory: MemoryPlan | None = None,
    ) -> None:
        self.memory = memory
        """The memory plan; None for a runner that `assemble` did not make."""
        self.eos_token_ids = files.eos_token_ids
        self.attention_backend = back_end.name
        self.device = back_end.device
        self.max_model_len = limits.max_len
        self.pairs_per_token = files.spec.pairs_per_token
        """How far attention costs as much as matrix products (`DecoderSpec.pairs_per_token`)."""
        self.vocab_size = limits.vocab_size
        self._is_measured_alone = back_end.is_measured_alone
        self._decoder = loaded.decoder
        self.cache = cache
        self.limits = limits
        self._widest = widest
        self._row_draw = loaded.row_draw or HostDraw(loaded.decoder, limits.vocab_size)
        self._decoding_steps = loaded.decoding_steps
        self._mtp = loaded.mtp
        self.grammars: GrammarMasks | None = None
        """What draws under grammars; None: nothing, and no request with one may come."""
        self._host_pool = host_blocks or HostBlockArrays(cache, 0)
        self._allowed_masks = AllowedMasks(limits.vocab_size)
        self._step_costs: StepCosts | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether it begins steps that are offered to it after others (`StepBatch`)."""
        return self._decoding_steps is not None

    @property
    def has_grammars(self) -> bool:
        """Whether it draws under grammars: its checkpoint has a tokenizer."""
        return self.grammars is not None

    def grammar_statistics(self) -> GrammarStatistics | None:
        """Return what following grammars took, on any thread; None where none is followed."""
        return None if self.grammars is None else self.grammars.statistics()

    def prepare_grammar(self, grammar: Grammar) -> Future[None] | None:
        """Begin to compile a grammar, on any thread; None: no step will wait for it.

        The future has the error, `InvalidRequest`, of a grammar that cannot be followed. Raises
        `Overloaded` while too many wait.
        """
        return None if self.grammars is None else self.grammars.prepare(grammar)

    @property
    def decoder(self) -> Decoder:
        """The decoder, which measurements take apart."""
        return self._decoder

    @property
    def layout(self) -> KVLayout:
        """Shape and identity of the cache's blocks."""
        return self.cache.layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, ids 0 to `num_blocks - 1`."""
        return self.cache.num_blocks

    @property
    def kv_bytes(self) -> np.ndarray:
        """The cache as bytes, for transfers, writable: `[num_layers, 2, num_blocks, piece_bytes]`.

        With `needs_staging` it is a mirror of the cache, otherwise the cache's own memory. Raises
        `InternalError` where there is a `card_pool`, through which transfers move it.
        """
        return self.cache.host_bytes

    @property
    def needs_staging(self) -> bool:
        """Whether KV that is written to `kv_bytes` must be staged in before a step reads it."""
        return self.cache.is_mirrored

    @property
    def card_pool(self) -> object | None:
        """See `cache.contract.Cache.card_pool`."""
        return self.cache.card_pool

    @property
    def stages_landings(self) -> bool:
        """Whether a flow has what lands staged in, and what is sent staged out.

        No: where the connector moves KV to and from the card itself.
        """
        return self.needs_staging and self.card_pool is None

    def begin_copy(self, copy: CacheCopy) -> CopyUnderWay:
        """Begin a copy between a mirrored cache and host memory, beside the steps.

        Raises `InternalError` for bad ids.
        """
        if copy.kind in (CopyKind.SWAP_IN, CopyKind.SWAP_OUT):
            return self._host_pool.begin_swap(
                copy.block_ids, copy.host_block_ids, is_out=copy.kind.is_out
            )
        return self.cache.begin_copy(
            copy.block_ids, self.kv_bytes, copy.block_ids, is_out=copy.kind.is_out
        )

    @property
    def num_host_blocks(self) -> int:
        """Blocks that can be swapped out at a time, ids 0 to `num_host_blocks - 1`."""
        return self._host_pool.num_blocks

    @property
    def host_kv(self) -> np.ndarray:
        """The host blocks: uint8 `[num_layers, planes, num_host_blocks, piece_bytes]`."""
        return self._host_pool.bytes

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy whole blocks, all layers, into the host pool; `InternalError` for bad ids.

        For a cache in host memory, as `swap_in`; `begin_copy` is for a mirrored one.
        """
        self._host_pool.swap_out(block_ids, host_block_ids)

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy whole blocks back from the host pool; `InternalError` for bad ids."""
        self._host_pool.swap_in(host_block_ids, block_ids)

    def execute(
        self,
        batch: StepBatch,
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        """Compute the batch's tokens and draw where asked; return what `Runner.execute` does.

        `on_layer(l)` is called for each layer of the cache as soon as transfers can read the step's
        keys and values in it, layer 0 first, an MTP layer after the draw. `on_queued` is called
        before the layers on a CPU, whose kernels need no interpreter, and before the draw on a
        device, which then has all layers to compute.

        Raises `InternalError` when the batch exceeds the runner's limits, and `SequencesFailed`
        when logits that some entries needed are not finite, or no token is left to draw.
        """
        if not batch:
            return RunnerResult()
        flat = flatten(batch, self.limits)
        pending = None
        if self.grammars is not None:
            asks_afterwards = self._row_draw.asks_afterwards
            pending = self.grammars.begin(batch, asks_afterwards=asks_afterwards)
        layers = self.cache.layers_out(flat.slots, on_layer)
        draws_after_all = len(flat.sampled_rows) == len(flat.token_ids)
        if self._decoding_steps is not None and draws_after_all:
            hidden = self._decoding_steps.begin(flat, batch)
        else:
            hidden = self._decoder.begin(flat)
        if on_queued is not None and not self.needs_staging:
            on_queued()
        for index in range(self._decoder.num_layers):
            self._decoder.run_layer(index, hidden)
            layers.on_computed(index)
        allowed = unmasked = None
        if pending is not None:
            if on_queued is not None and batch.has_gone_on:
                on_queued()  # the step before is reported while masks are filled
                on_queued = None
            allowed, unmasked = pending.wait(), pending.unmasked
        rows = sampled_rows(
            batch, self.vocab_size, self.eos_token_ids, allowed, self._allowed_masks, unmasked
        )
        if on_queued is not None and self.needs_staging:
            on_queued()
        draws = self._row_draw.draw(hidden, flat.sampled_rows, rows, batch)
        drawn, bad = accept_drafts(batch, draws)
        scores, unscored = find_prompt_logprobs(self._decoder, hidden, flat, batch, self.vocab_size)
        results = RunnerResult(drawn, scores, left_behind=draws.left_behind)
        for entry in unscored:
            results[entry] = None
        if pending is not None and self.grammars is not None:
            self.grammars.propose(batch, results)
        if self._mtp is not None:
            self._propose(self._mtp, batch, flat, hidden, results)
            layers.on_computed(self._decoder.num_layers)
        layers.finish()
        if bad or unscored:
            failures = {} if pending is None else pending.failures
            errors = why_undrawn(bad, batch, draws, rows, failures)
            for entry in unscored:
                errors[entry] = InternalError("logits of the prompt are not finite")
            raise SequencesFailed(errors, results)
        return results

    def _propose(
        self,
        mtp: MtpLayer,
        batch: StepBatch,
        flat: FlatBatch,
        hidden: Any,
        results: list[DrawnTokens | None],
    ) -> None:
        """Compute the MTP layer's keys and values of this step; write its drafts into `results`."""
        step = plan_drafts(batch, flat, results, self.limits)
        if step is None:
            return
        for entry, draft_token_ids in run_drafts(mtp, hidden, step, self.limits.block_size):
            result = results[entry]
            assert result is not None
            result.draft_token_ids = draft_token_ids

    def log_likelihoods(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return ln p of each token but the first, after all before it: float64.

        As `logits_of_all`.
        """
        found: list[np.ndarray] = []
        for rows in self.logits_of_all(token_ids):
            start = sum(map(len, found))
            logits = rows.astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            following = np.asarray(token_ids[start + 1 :][: len(rows)])
            chosen = logits[np.arange(len(rows)), following]
            found.append(chosen - np.log(np.exp(logits).sum(axis=1)))
        return np.concatenate(found) if found else np.empty(0)

    def logits_of_all(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the logits after each token but the last, some rows at a time.

        For measurements of a model's accuracy. Overwrites the first blocks. Raises `InternalError`
        for more tokens than a sequence may have.
        """
        size, most = self.layout.block_size, self.limits.max_tokens
        table = range(blocks_for(len(token_ids), size))
        count = len(token_ids) - 1
        for start in range(0, count, most):
            chunk = token_ids[start : min(start + most, count)]
            scheduled = ScheduledSequence(0, chunk, start, table, None)
            hidden = self._decoder.begin(flatten(batch_of([scheduled]), self.limits))
            for index in range(self._decoder.num_layers):
                self._decoder.run_layer(index, hidden)
            for first in range(0, len(chunk), MAX_SAMPLED_ROWS):
                rows = np.arange(first, min(first + MAX_SAMPLED_ROWS, len(chunk)))
                yield self._decoder.logits(hidden, rows)

    @property
    def step_costs(self) -> StepCosts:
        """The cost of steps on this machine; `InternalError` before `warm_up` has measured it."""
        if self._step_costs is None:
            raise InternalError("step_costs were not measured: warm_up must run first")
        return self._step_costs

    def warm_up(self) -> None:
        """Compile or load every kernel, touch every weight, and measure what a step costs.

        Of a mixture most experts are touched: its tokens differ, and each goes to a few.

        Computes a few tokens in the first blocks, so they must not hold cached KV yet. No other
        process of the machine does so at the same time where that would change what is measured.
        """
        with alone_on_machine() if self._is_measured_alone else nullcontext():
            self._warm_up()

    def _warm_up(self) -> None:
        length = min(32, self.max_model_len, self.limits.max_tokens)
        table = range(blocks_for(length, self.layout.block_size))
        kinds = (
            SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=1),
            SamplingParams(
                max_tokens=1, temperature=1.0, top_k=5, top_p=0.9, min_p=0.01,
                repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
            ),
        )  # fmt: skip
        with compile_once(f"warm-up {self.attention_backend}, drafts: {self._mtp is not None}"):
            for params in kinds:
                sample = SampleInput(params, 0, [0] * length, [])
                tokens = unlike_tokens(0, length, self.limits.vocab_size)
                many = ScheduledSequence(0, tokens, 0, table, sample, num_proposals=2)
                self.execute(batch_of([many]))
                self.execute(batch_of([ScheduledSequence(0, [0], length - 1, table, sample)]))
        self._step_costs = measure_step_costs(
            self.execute, self.limits, self._widest, has_proposals=self._mtp is not None
        )
