"""Real models on pools too small for what they serve: one node, or a prefill and a decode node.

Schedulers and runners are the real ones, driven in this process as the step loop drives them. A
handoff copies the blocks from pool to pool.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import nullcontext
from functools import cache
from itertools import count
from pathlib import Path

from common.kv.token_budget import num_speculative_tokens
from common.observing.clock import MonotonicClock
from common.prompt_logprobs import PromptLogprobs
from common.request import GenerationRequest, TokenLogprobs
from common.settings.config import EngineConfig, ModelConfig, SchedulingConfig, SpeculationConfig
from engine.core.blocks.cache_copy import CacheCopy, CopyKind, PrefixCopy
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import RunnerResult, StepCosts
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.speculation.speculation import make_speculation
from engine.core.step.step_in_flight import PlannedStep, SwapCopy
from engine.execution import Execution, ExecutionHere, ExecutionThread
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from pdserve.checkpoints.demo_model import demo_model_folder
from pdserve.checkpoints.speculative_model import resolve_speculation
from tests.support.engine.build import check_books, check_idle
from tests.support.engine.mirrored_cache import mirrored_caches

BLOCK_SIZE = 16
NUM_DRAFTS = 3
_MOST_STEPS = 2000
COPY_STEPS = 3
"""How many steps the copy of a swapped sequence takes on a mirrored cache."""


def load_runner(
    folder: Path,
    num_drafts: int,
    max_chunk_tokens: int = 512,
    *,
    activation_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    is_mirrored: bool = False,
) -> ModelRunner:
    """Load a runner with the demo model's mtp layer; it serves the other methods as well.

    No step of it has more than `max_chunk_tokens` tokens. Products with quantised weights are
    computed in `activation_dtype`. The cache stores `kv_cache_dtype`; with `is_mirrored`, it is
    other memory than transfers and swaps use, as on a device. What steps cost is not measured:
    `Node` has `COSTS`.
    """
    speculation = resolve_speculation(
        SpeculationConfig(speculative_method="mtp", num_speculative_tokens=num_drafts), folder
    )
    with mirrored_caches() if is_mirrored else nullcontext():
        return load_model_runner(
            ModelConfig(model=str(folder), max_model_len=512, activation_dtype=activation_dtype),
            EngineConfig(
                block_size=BLOCK_SIZE, kv_cache_memory=64 << 20, kv_cache_dtype=kv_cache_dtype
            ),
            speculation=speculation,
            host_space=32 << 20,
            max_chunk_tokens=max_chunk_tokens,
        )


@cache
def demo_runners() -> tuple[ModelRunner, ModelRunner]:
    """Load two runners of the demo model, once in a process: nodes leave nothing in them."""
    folder = demo_model_folder()
    return load_runner(folder, NUM_DRAFTS), load_runner(folder, NUM_DRAFTS)


@cache
def mirrored_runner() -> ModelRunner:
    """Load a runner of the demo model whose cache is mirrored, once in a process."""
    return load_runner(demo_model_folder(), NUM_DRAFTS, is_mirrored=True)


COSTS = StepCosts((1, 8, 64), (0.02, 0.03, 0.1), draft_s=0.001)
"""Fixed, so that every run drafts the same; drafts pay, but not all of them."""


class Node:
    """One engine: a scheduler with a pool of `num_blocks` on a runner that has more.

    With `is_async`, a step runs on a thread of its own while the next one is planned.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_blocks: int,
        config: SchedulingConfig,
        speculation: SpeculationConfig,
        num_seats: int = 4,
        budget: int = 64,
        is_async: bool = False,
        keeps_prefixes: bool = False,
        num_host_blocks: int | None = None,
    ) -> None:
        # What an earlier run left in the pool must not help this one.
        runner.kv_bytes[...] = 0
        if runner.needs_staging:
            _copy(runner, CopyKind.STAGE_IN, range(runner.num_blocks))
        self._copies: list[tuple[int, SwapCopy | PrefixCopy]] = []
        """Copies to and from host memory, and in which step each is made."""
        self._num_steps = 0
        self.runner = runner
        kind = ExecutionThread if is_async else ExecutionHere
        self._execution: Execution = kind(runner, MonotonicClock())
        most = num_speculative_tokens(
            speculation.speculative_method, speculation.num_speculative_tokens
        )
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=num_seats,
                max_num_batched_tokens=budget,
                block_size=BLOCK_SIZE,
                max_model_len=(num_blocks - 1) * BLOCK_SIZE,
                num_speculative_tokens=most,
                pairs_per_token=runner.pairs_per_token,
            ),
            num_blocks=num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=runner.eos_token_ids,
            config=config,
            speculation=make_speculation(speculation, COSTS),
            num_host_blocks=min(num_host_blocks or num_blocks, runner.num_host_blocks),
            keeps_prefixes=keeps_prefixes,
            swaps_late=runner.needs_staging,
        )
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.largest_step = 0
        """Tokens of the largest step so far."""
        self._ids = count(1)

    @property
    def is_busy(self) -> bool:
        """Whether a sequence runs, waits or holds blocks."""
        scheduler = self.scheduler
        return bool(
            scheduler.running
            or scheduler.waiting
            or scheduler.receiving
            or scheduler.exporting
            or self._copies
        )

    def add(self, request: GenerationRequest, **kind: bool) -> Sequence:
        """Queue a request."""
        sequence = Sequence(next(self._ids), request, **kind)
        self.outputs[sequence.sequence_id] = list(request.output_token_ids)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        """Run one step, with all invariants checked before and after."""
        self._end_copies()
        step = self.scheduler.plan()
        check_books(self.scheduler)
        assert not step.starved
        num_tokens = sum(len(one.token_ids) for one in step.batch)
        self.largest_step = max(self.largest_step, num_tokens)
        for copy in step.swap_outs:
            self.runner.swap_out(copy.block_ids, copy.host_block_ids)
        for copy in step.swap_ins:
            self.runner.swap_in(copy.host_block_ids, copy.block_ids)
        self._copies += [(self._num_steps + COPY_STEPS, swap) for swap in step.swap_copies]
        outputs = self.scheduler.apply(step, self._execute(step))
        check_books(self.scheduler)
        for output in outputs:
            sequence_id = output.sequence.sequence_id
            self.outputs[sequence_id] += output.token_ids
            self.logprobs.setdefault(sequence_id, []).extend(output.logprobs)
            if output.prompt_logprobs is not None:
                assert sequence_id not in self.prompt_logprobs, "they came twice"
                self.prompt_logprobs[sequence_id] = output.prompt_logprobs

    def _end_copies(self) -> None:
        """Make the copies that are due; their blocks must be as they were at the beginning."""
        self._num_steps += 1
        while self._copies and self._copies[0][0] <= self._num_steps:
            _, swap = self._copies.pop(0)
            kind = CopyKind.SWAP_OUT if swap.is_out else CopyKind.SWAP_IN
            _copy(self.runner, kind, swap.block_ids, swap.host_block_ids)
            self.scheduler.end_copy(swap, is_good=True)
            check_books(self.scheduler)

    def _execute(self, step: PlannedStep) -> RunnerResult:
        if not step.batch:
            return RunnerResult()
        self._execution.begin(step.batch, None)
        if self._execution.is_beside:
            self._execution.wait_until_queued()
            self.scheduler.plan_ahead(step)
        results, _ = self._execution.wait()
        return results


def answer_together(node: Node, requests: Items[GenerationRequest]) -> list[list[int]]:
    """Answer all requests at once on one node."""
    sequences = [node.add(request) for request in requests]
    for _ in range(_MOST_STEPS):
        if not node.is_busy:
            check_idle(node.scheduler)
            return [node.outputs[s.sequence_id] for s in sequences]
        node.step()
    raise AssertionError("the node stalls")


def answer_with_handoff(
    prefill: Node, decode: Node, requests: Items[GenerationRequest]
) -> list[list[int]]:
    """Compute prompts on one node, and everything after the first token on the other."""
    pairs = []
    for request in requests:
        pairs.append(
            (prefill.add(request, is_exported=True), decode.add(request, has_remote_kv=True))
        )
    for _ in range(_MOST_STEPS):
        if not (prefill.is_busy or decode.is_busy):
            check_idle(prefill.scheduler)
            check_idle(decode.scheduler)
            return [decode.outputs[target.sequence_id] for _, target in pairs]
        prefill.step()
        for source, target in pairs:
            is_ready = source.status is SequenceStatus.EXPORTING
            if is_ready and target.status is SequenceStatus.WAITING_FOR_KV:
                _hand_off(prefill, decode, source, target)
        decode.step()
    raise AssertionError("the nodes stall")


def _hand_off(prefill: Node, decode: Node, source: Sequence, target: Sequence) -> None:
    first = target.num_cached_tokens // BLOCK_SIZE
    theirs = source.block_table[first:]
    ours = target.block_table[first : len(source.block_table)]
    if prefill.runner.needs_staging:
        _copy(prefill.runner, CopyKind.STAGE_OUT, theirs)
    decode.runner.kv_bytes[:, :, ours] = prefill.runner.kv_bytes[:, :, theirs]
    if decode.runner.needs_staging:
        _copy(decode.runner, CopyKind.STAGE_IN, ours)
    (token_id,) = source.output_token_ids
    output = decode.scheduler.land(target, token_id, tuple(source.proposed_token_ids))
    decode.outputs[target.sequence_id] += output.token_ids
    prefill.scheduler.release(source)


def _copy(
    runner: ModelRunner, kind: CopyKind, block_ids: Items[int], host_block_ids: Items[int] = ()
) -> None:
    assert runner.begin_copy(CacheCopy(kind, block_ids, host_block_ids)).is_done()
