"""The period of a node's steps on a device, with steps planned one after the other or ahead.

A real scheduler, flow and step loop; the device is a pause of `DEVICE_S` without the interpreter's
lock, between laying out a step and handing over its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.scheduler.local_node import tickets_without_kv
from common.ids import AttemptId, Incarnation
from common.observing.clock import MonotonicClock
from common.request import GenerationRequest, SamplingParams
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import (
    DrawnTokens,
    OnLayer,
    OnQueued,
    RunnerResult,
    ScheduledSequence,
)
from engine.core.scheduler import Scheduler
from engine.core.step.step_batch import StepBatch
from engine.runner.flat_batch import BatchLimits, flatten
from engine.step_loop import StepLoop
from node.flow.flow_limits import FlowLimits
from node.flow.inbox import Inbox
from node.flow.messages import Effect, Message, Submit
from node.flow.node_flow import NodeFlow
from node.flow.pulls.pull_cost import PullCost

DEVICE_S = 0.01
_BLOCK_SIZE = 64
_NUM_PROMPT = 512
_MAX_TOKENS = 8192
_MAX_MODEL_LEN = 32_768
_VOCAB_SIZE = 50_000
_BLOCKS_PER_SEQUENCE = 192
_WARM_UP_STEPS = 20
_HERE = Incarnation("bench", 1)


class PausedRunner:
    """Draws the same token everywhere, after a pause."""

    def __init__(self, num_blocks: int) -> None:
        self._limits = BatchLimits(
            max_tokens=_MAX_TOKENS,
            max_len=_MAX_MODEL_LEN,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            vocab_size=_VOCAB_SIZE,
        )
        self.pause_s = 0.0

    def execute(
        self,
        batch: Sequence[ScheduledSequence],
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        assert isinstance(batch, StepBatch)
        flatten(batch, self._limits)
        if on_queued is not None:
            on_queued()
        if self.pause_s:
            time.sleep(self.pause_s)
        return RunnerResult(
            DrawnTokens((7,)) if is_sampled else None for is_sampled in batch.is_sampled
        )

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        raise AssertionError("a sequence was preempted")

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        raise AssertionError("a sequence resumed")


class DeviceNode:
    """A node whose `num_running` sequences decode, and as many more wait for seats."""

    def __init__(self, num_running: int, *, is_async: bool) -> None:
        num_blocks = num_running * _BLOCKS_PER_SEQUENCE
        self.num_running = num_running
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=num_running,
                max_num_batched_tokens=_MAX_TOKENS,
                block_size=_BLOCK_SIZE,
                max_model_len=_MAX_MODEL_LEN,
            ),
            num_blocks=num_blocks,
            fingerprint="bench",
            eos_token_ids=frozenset(),
        )
        self._runner = PausedRunner(num_blocks)
        self._inbox = Inbox(max_requests=2 * num_running)
        self._unsent: list[Effect] = []
        self._loop: StepLoop[Message, Effect] = StepLoop(
            inbox=self._inbox,
            flow=self._flow(),
            runner=self._runner,
            perform=self._unsent.append,
            flush=self._unsent.clear,
            clock=MonotonicClock(),
            is_async=is_async,
        )
        self._start()

    def _flow(self) -> NodeFlow:
        return NodeFlow(
            self.scheduler,
            FlowLimits(
                vocab_size=_VOCAB_SIZE,
                max_model_len=_MAX_MODEL_LEN,
                max_queued_requests=2 * self.num_running,
            ),
            tickets=tickets_without_kv(_HERE),
            needs_staging=False,
            local_prefill_threshold=_NUM_PROMPT,
            pull_cost=PullCost(1.0, float),
        )

    def _start(self) -> None:
        for number in range(2 * self.num_running):
            tokens = (number, *range(_NUM_PROMPT - 1))
            sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0)
            request = GenerationRequest(
                id=AttemptId(f"bench-{number}", 1),
                prompt_token_ids=tokens,
                sampling=sampling,
                deadline_s=3600.0,
            )
            self._inbox.put(
                Submit(request=request, router=_HERE, reply_to=number, received_at_s=0.0)
            )
        while not self._all_decode():
            self._loop.turn()
        self._runner.pause_s = DEVICE_S
        for _ in range(_WARM_UP_STEPS):
            self._loop.turn()

    def _all_decode(self) -> bool:
        running = self.scheduler.running
        return len(running) == self.num_running and all(s.is_decoding for s in running)

    def step(self) -> float:
        """Return the seconds from the begin of a turn to the begin of the next."""
        began_s = time.perf_counter()
        self._loop.turn()
        return time.perf_counter() - began_s

    @property
    def num_planned_ahead(self) -> int:
        """Steps that were planned while the one before ran."""
        return self.scheduler.statistics().counters.plans_ahead["taken"]


def step_periods_s(num_running: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the periods of steps one after the other, and of overlapped ones; they take turns."""
    plain = DeviceNode(num_running, is_async=False)
    overlapped = DeviceNode(num_running, is_async=True)
    periods: tuple[list[float], list[float]] = ([], [])
    before = overlapped.num_planned_ahead
    for _ in range(-(-num_steps // _WARM_UP_STEPS)):
        for node, found in zip((plain, overlapped), periods, strict=True):
            node.step()  # what happened to the other one meanwhile is not in the figures
            found += [node.step() for _ in range(_WARM_UP_STEPS)]
    assert overlapped.num_planned_ahead - before >= num_steps, "steps were not planned ahead"
    assert plain.num_planned_ahead == 0
    return periods
