"""Modelled steps on the virtual clock, and the tokens that they draw.

A step of decodes alone, after which the same step would be planned again and again, is run several
times at once: until an answer ends, a deadline of the node has passed, or a message comes. Its
owner cuts it short with `interrupt`. A full block changes only the scheduler (`go_on`). The result
is that of one step after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from engine.core.runner_contract import OnLayer, RunnerResult
from engine.core.scheduler import Scheduler
from engine.core.step.step_batch import StepBatch
from simulator.drawing import drawn, not_last, num_left
from simulator.profile import StepTimes
from simulator.profiles.shared_cores import PacedStep, SharedCores
from simulator.timeline import Timeline


class ModelledExecution:
    """The `Execution` of a node's step loop. The loop's turn at `ends_at_s` takes the results.

    With `may_repeat`, equal steps are run at once. A step whose layers are pushed takes `push_s`
    longer. `next_due_s` returns the time of the node's next deadline. On `cores` that nodes share,
    steps of other nodes change the end of a step: `on_moved` is called then.
    """

    is_beside, plans_ahead = True, False

    def __init__(
        self,
        timeline: Timeline,
        cost: StepTimes,
        scheduler: Scheduler,
        *,
        num_layers: int,
        may_repeat: bool,
        next_due_s: Callable[[], float | None],
        cores: SharedCores | None = None,
        push_s: float = 0.0,
    ) -> None:
        self._timeline = timeline
        self._cost = cost
        self._scheduler = scheduler
        self._num_layers = num_layers
        self._may_repeat = may_repeat and cores is None
        self._next_due_s = next_due_s
        self._cores = cores
        self._push_s = push_s
        self._paced: PacedStep | None = None
        self.on_moved: Callable[[], object] = lambda: None
        self._batch: StepBatch | None = None
        self._on_layer: OnLayer | None = None
        self._next_layer, self._layer_at_s = 0, -1.0
        self._began_s = 0.0
        """Time at which the step was begun, or went on at a full block."""
        self._ends_s: list[float] = []
        self._num_recorded = 0
        """The number of these steps that the scheduler has recorded."""
        self._num_left: list[int] = []
        """The tokens that each entry of the step had still to draw when it was begun."""
        self._num_known: list[int] = []
        """The known tokens of each entry when the step was begun, if all entries decode."""
        self._until_end = 0
        """Steps until an answer ends, or another step must be planned; 0: each is planned."""
        self._context = 0
        """The tokens to which the next steps attend, when the first of them begins."""
        self._num_copied = 0
        self.ended_s: list[float] = []
        """The ends of the steps whose results were taken last."""
        self.busy_s = 0.0
        self.num_runs = 0

    @property
    def is_running(self) -> bool:
        """Whether a step is under way."""
        return self._batch is not None

    @property
    def ends_at_s(self) -> float:
        """When the steps under way have ended."""
        return self._ends_s[-1]

    def copy(self, num_blocks: int) -> None:
        """Copy blocks from or to the host in the next step."""
        self._num_copied += num_blocks

    def begin(self, batch: StepBatch, on_layer: OnLayer | None) -> None:
        """Begin a step."""
        self._batch, self._began_s = batch, self._timeline.present_s
        self._num_left, self._num_recorded, self._until_end = num_left(batch), 0, 0
        self.num_runs += 1
        num_copied, self._num_copied = self._num_copied, 0
        if on_layer is None and not num_copied and batch.is_plain_decodes:
            self._num_known = batch.seats.num_known.take(batch.rows).tolist()
            self._context = sum(self._num_known)
            self._until_end = self._num_until_end(batch)
            self._ends_s = self._ends_of_decodes(batch)
        else:
            push_s = 0.0 if on_layer is None else self._push_s
            self._ends_s = [self._began_s + self._cost.step_s(batch, num_copied) + push_s]
        if self._cores is not None:
            took_s = self._ends_s[0] - self._began_s
            self._paced = self._cores.begin(
                took_s,
                self._on_pace,
                self._began_s,
                computes_prompts=batch.has_prompts,
            )
            self._ends_s = [self._cores.done_at_s(self._paced)]
        self._on_layer, self._next_layer = on_layer, 0
        if on_layer is not None:
            self._plan_layer()

    def interrupt(self) -> bool:
        """End the steps under way with the one that runs now; return whether that changes."""
        index = bisect_left(self._ends_s, self._timeline.present_s, self._num_recorded)
        is_new = index + 1 < len(self._ends_s)
        del self._ends_s[index + 1 :]
        return is_new

    def go_on(self) -> bool:
        """Go on with the steps under way, the last of which ends now; False: they have ended.

        To be called when no message has reached the node, and its loop would only run them again.
        """
        batch, now_s, due_s = self._batch, self._timeline.present_s, self._next_due_s()
        num_steps = len(self._ends_s)
        if num_steps >= self._until_end or (due_s is not None and due_s <= now_s):
            return False
        assert batch is not None, "a step is under way"
        num_new, took_s = num_steps - self._num_recorded, now_s - self._began_s
        if not self._scheduler.go_on(batch, not_last(len(batch), num_new), took_s):
            return False
        self.busy_s += took_s
        self._began_s, self._num_recorded = now_s, num_steps
        self._context += len(batch) * num_new
        self._ends_s += self._ends_of_decodes(batch)
        return True

    def wait_until_queued(self) -> None:
        """Return at once: there is no interpreter to share."""

    def wait(self) -> tuple[RunnerResult, float]:
        """Return the results. The clock must be at `ends_at_s`."""
        batch, self._batch = self._batch, None
        assert batch is not None, "a step is under way"
        assert self._timeline.present_s == self.ends_at_s, "its results are asked for when it ends"
        self.ended_s, self._ends_s = self._ends_s, []
        if self._cores is not None and self._paced is not None:
            self._cores.end(self._paced, self._timeline.present_s)
        took_s = self.ended_s[-1] - self._began_s
        self.busy_s += took_s
        count = len(self.ended_s)
        tokens = drawn(batch, count, self._num_left)
        return RunnerResult(tokens, num_steps=count, num_recorded=self._num_recorded), took_s

    def close(self) -> None:
        """Do nothing: there is no thread to end."""

    def _on_pace(self) -> None:
        """Move the end of the step under way: a step of another node has begun or ended."""
        assert self._cores is not None, "its cores are shared"
        assert self._paced is not None, "a step is under way"
        self._ends_s = [self._cores.done_at_s(self._paced)]
        if self._next_layer < self._num_layers and self._on_layer is not None:
            self._plan_layer()
        self.on_moved()

    def _plan_layer(self) -> None:
        share = (self._next_layer + 1) / self._num_layers
        if self._cores is not None and self._paced is not None:
            at_s = self._cores.done_at_s(self._paced, share)
        else:
            at_s = self._began_s + (self._ends_s[0] - self._began_s) * share
        self._layer_at_s = max(self._timeline.present_s, min(at_s, self._ends_s[0]))
        self._timeline.at(self._layer_at_s, partial(self._end_layer, self._layer_at_s))

    def _end_layer(self, planned_for_s: float) -> None:
        if planned_for_s != self._layer_at_s or self._on_layer is None:
            return  # the pace has changed since
        layer, self._next_layer, self._layer_at_s = self._next_layer, self._next_layer + 1, -1.0
        self._on_layer(layer)
        if self._next_layer < self._num_layers:
            self._plan_layer()

    def _ends_of_decodes(self, batch: StepBatch) -> list[float]:
        """Return the ends of a step of decodes and of those that would follow it unchanged."""
        num_steps = self._num_to_full_block() if self._until_end else 1
        due_s, count = self._next_due_s(), len(batch)
        ends_s = self._cost.ends_of_decodes(self._began_s, count, self._context, num_steps)
        if due_s is not None:
            del ends_s[bisect_left(ends_s, due_s) + 1 :]
        return ends_s

    def _num_until_end(self, batch: StepBatch) -> int:
        """Return how often the step can be run until an answer ends; 0: another one may follow."""
        scheduler = self._scheduler
        if not self._may_repeat or scheduler.waiting or len(batch) < len(scheduler.running):
            return 0
        num_prompt_of, most_of = batch.seats.num_prompt.item, batch.seats.max_new_tokens.item
        num_left = [
            num_prompt_of(row) + most_of(row) - num_known
            for row, num_known in zip(batch.rows.tolist(), self._num_known, strict=True)
        ]
        return max(1, min(*num_left, *self._num_left))

    def _num_to_full_block(self) -> int:
        """Return how often the step can be run until a block is full, or an answer ends."""
        block_size, num_new = self._scheduler.limits.block_size, self._num_recorded - 1
        # The last known token is computed next, and a block is full when its last slot is written.
        num_used = max((known + num_new) % block_size for known in self._num_known)
        return min(block_size - num_used, self._until_end - self._num_recorded)
