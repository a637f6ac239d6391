"""What scheduling costs: `python -m bench.scheduler --json`.

    plan_ms        one call of `Scheduler.plan` with 256 sequences decoding and W waiting: drafts,
                   plan, blocks taken, batch built
    plan_cpu_ms    its processor time: the same on an idle machine, and free of what others do to it
    step_ms        plan and `Scheduler.apply` of its results

W is 100, 1000 and 10,000 (keys `w100` …), each as p50 and p99 in milliseconds. All of it is Python
on one core; the model's time is not in it. In these cases 512 seats make half of them free, so that
in every step the blocks kept back for 256 outputs are summed up and the head of the queue is tried,
and those behind it that may skip ahead; none fits, because its blocks are reserved. Further keys:

    r256, r1024         256 and 1,024 sequences decoding, 1,000 waiting: `plan_ms`, `apply_ms`,
                        `flatten_ms` (laying the batch out for the runner's kernels) and their sum,
                        `step_ms`; and of a whole node on a device that takes 10 ms for a step
                        (`bench.scheduler.overlap`) the period of its steps, one after the other
                        (`serial_step_ms`) and planned ahead (`overlapped_step_ms`)
    seats_full_w1000    256 seats: no waiting sequence is tried
    ngram_w1000         as `w1000`, and drafts from the n-gram drafter are proposed and verified
    w10000_over_w100    the ratio of the two medians (`…_cpu`: of processor time)

As in a node, what exists before the first measured step is excluded from garbage collection.

The three queues take turns, step by step and in a new order each time: a machine whose speed drifts
does so for all, and none always finds the processor's caches as the same other one left them. The
further cases follow, in turns as well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count

from bench.scheduler.overlap import step_periods_s
from common.ids import AttemptId
from common.kv.token_budget import num_speculative_tokens
from common.long_lived import exclude_from_collection
from common.observing.latency import percentile
from common.request import GenerationRequest, SamplingParams
from common.settings.config import SpeculationConfig
from engine.core.blocks.block_pool import BlockUse
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import (
    DrawnTokens,
    RunnerResult,
    StepCosts,
)
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.speculation.speculation import make_speculation
from engine.core.step.step_batch import StepBatch
from engine.core.step.step_in_flight import PlannedStep
from engine.runner.flat_batch import BatchLimits, flatten

NUM_RUNNING = 256
BLOCK_SIZE = 64
MAX_TOKENS = 8192
MAX_MODEL_LEN = 32_768
_RUNNING_PROMPT = 512
_WAITING_PROMPTS = (256, 512, 1024, 2048, 4096)
_WARM_UP_STEPS = 20
_BLOCKS_PER_SEQUENCE = 192
"""More than the longest output fills, so that a reservation lets all of them start."""
_VOCAB_SIZE = 50_000
# The shape of a GPU: flat while it waits for memory, then proportional to the rows.
_COSTS = StepCosts((1, 128, 256, 512, 1024, 2048), (0.012, 0.012, 0.022, 0.044, 0.088, 0.176))


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: the numbers of sequences that wait and run, of seats, and the drafter."""

    name: str
    num_waiting: int
    num_running: int = NUM_RUNNING
    has_free_seats: bool = True
    method: str = "none"

    @property
    def max_num_seqs(self) -> int:
        """Seats: half of them stay free, or none."""
        return self.num_running * (2 if self.has_free_seats else 1)


QUEUES = (Case("w100", 100), Case("w1000", 1000), Case("w10000", 10_000))
BATCHES = (Case("r256", 1000, num_running=256), Case("r1024", 1000, num_running=1024))
OTHERS = (
    Case("seats_full_w1000", 1000, has_free_seats=False),
    Case("ngram_w1000", 1000, method="ngram"),
)


class PhraseBook:
    """Texts made of recurring phrases: some drafts are right, some are not."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._phrases = [[rng.randrange(30_000) for _ in range(12)] for _ in range(16)]

    def tokens(self, seed: int) -> Iterator[int]:
        """Yield an endless text, which begins with a token of its own for each seed."""
        rng = random.Random(seed)
        yield 30_000 + seed
        while True:
            yield from rng.choice(self._phrases)


@dataclass(frozen=True, slots=True)
class StepSpans:
    """Seconds of one step's parts."""

    plan_s: float
    plan_cpu_s: float
    apply_s: float
    flatten_s: float


class BusyNode:
    """A scheduler in the middle of its work, and the text that its absent model draws."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._texts: dict[int, Iterator[int]] = {}
        self._ahead: dict[int, list[int]] = {}
        self._book = PhraseBook(seed=1)
        self._next_id = count()
        most_drafts = num_speculative_tokens(case.method, 0)
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=case.max_num_seqs,
                max_num_batched_tokens=8192,
                block_size=BLOCK_SIZE,
                max_model_len=MAX_MODEL_LEN,
                num_speculative_tokens=most_drafts,
            ),
            num_blocks=case.num_running * _BLOCKS_PER_SEQUENCE,
            fingerprint="bench",
            eos_token_ids=frozenset(),
            speculation=make_speculation(SpeculationConfig(speculative_method=case.method), _COSTS),
        )
        self._batch_limits = BatchLimits(
            max_tokens=8192,
            max_len=MAX_MODEL_LEN,
            num_blocks=case.num_running * _BLOCKS_PER_SEQUENCE,
            block_size=BLOCK_SIZE,
            vocab_size=_VOCAB_SIZE,
        )
        self._num_spare_blocks = 2 * case.num_running
        self._ballast: list[int] = []
        self._start()

    def _start(self) -> None:
        """Start decoding the running sequences, add the waiting ones, and leave few blocks free."""
        for _ in range(self.case.num_running):
            self._add(_RUNNING_PROMPT)
        while self.scheduler.waiting or not all(s.is_decoding for s in self.scheduler.running):
            self.step()
        for i in range(self.case.num_waiting):
            self._add(_WAITING_PROMPTS[i % len(_WAITING_PROMPTS)])
        pool = self.scheduler.pool
        self._ballast = pool.allocate(
            pool.num_available - self._num_spare_blocks, BlockUse.RESERVED
        )
        for _ in range(_WARM_UP_STEPS):
            self.step()

    def _add(self, num_prompt: int) -> None:
        sequence_id = next(self._next_id)
        text = self._book.tokens(sequence_id)
        request = GenerationRequest(
            id=AttemptId(f"bench-{sequence_id}", 1),
            prompt_token_ids=tuple(next(text) for _ in range(num_prompt)),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            deadline_s=float("inf"),
        )
        self._texts[sequence_id], self._ahead[sequence_id] = text, []
        self.scheduler.add(Sequence(sequence_id, request))

    def step(self) -> StepSpans:
        """Plan one step and apply its results."""
        began_cpu_s, began_s = time.thread_time(), time.perf_counter()
        step = self.scheduler.plan()
        planned_s = time.perf_counter() - began_s
        planned_cpu_s = time.thread_time() - began_cpu_s
        flatten_s = self._flatten(step.batch)
        drawn = self._draw(step)
        began_s = time.perf_counter()
        self.scheduler.apply(step, RunnerResult(drawn))
        applied_s = time.perf_counter() - began_s
        self._refill()
        return StepSpans(planned_s, planned_cpu_s, applied_s, flatten_s)

    def _flatten(self, batch: StepBatch) -> float:
        if not batch:
            return 0.0
        began_s = time.perf_counter()
        flatten(batch, self._batch_limits)
        return time.perf_counter() - began_s

    def _refill(self) -> None:
        """Leave blocks for the next step: enough to preempt none, too few to seat any."""
        pool = self.scheduler.pool
        missing = self._num_spare_blocks - pool.num_available
        if self._ballast and missing > 0:
            pool.release(self._ballast[-missing:])
            del self._ballast[-missing:]

    def _draw(self, step: PlannedStep) -> list[DrawnTokens | None]:
        """Return what each sequence draws: drafts are accepted as long as they equal the text."""
        is_sampled, num_drafts = step.batch.is_sampled.tolist(), step.batch.num_drafts.tolist()
        return [
            self._drawn(sequence.sequence_id, step.batch.drafts(entry) if num_drafts[entry] else [])
            if is_sampled[entry]
            else None
            for entry, sequence in enumerate(step.sequences)
        ]

    def _drawn(self, sequence_id: int, drafts: list[int]) -> DrawnTokens:
        text, ahead = self._texts[sequence_id], self._ahead[sequence_id]
        while len(ahead) <= len(drafts):
            ahead.append(next(text))
        num_right = 0
        while num_right < len(drafts) and drafts[num_right] == ahead[num_right]:
            num_right += 1
        tokens = tuple(ahead[: num_right + 1])
        del ahead[: num_right + 1]
        return DrawnTokens(tokens)

    def check(self) -> None:
        """Raise `AssertionError` unless the measured state is the case's."""
        statistics = self.scheduler.statistics()
        assert statistics.num_running == self.case.num_running, "a sequence ended or was seated"
        assert statistics.num_waiting == self.case.num_waiting, "a waiting sequence was seated"
        assert statistics.counters.num_preemptions == 0, "a sequence was preempted"
        stopped = statistics.counters.stops["reserved" if self.case.has_free_seats else "no_seat"]
        assert stopped >= _WARM_UP_STEPS, "admissions ended for another reason"
        assert (statistics.counters.num_drafted > 0) == (self.case.method != "none"), (
            "drafts were not tried"
        )


def measure(cases: Items[Case], num_steps: int) -> dict[str, list[StepSpans]]:
    """Return the spans of every case's steps; the cases take turns."""
    nodes = []
    for case in cases:
        print(f"setting up {case.name}", file=sys.stderr)
        nodes.append(BusyNode(case))
    exclude_from_collection()
    spans: dict[str, list[StepSpans]] = {case.name: [] for case in cases}
    rng = random.Random(0)
    for _ in range(num_steps):
        rng.shuffle(nodes)
        for node in nodes:
            spans[node.case.name].append(node.step())
    for node in nodes:
        node.check()
    return spans


def _figures(spans: list[StepSpans]) -> dict[str, float]:
    kinds = {
        "plan_ms": [span.plan_s for span in spans],
        "plan_cpu_ms": [span.plan_cpu_s for span in spans],
        "step_ms": [span.plan_s + span.apply_s for span in spans],
    }
    return _percentiles(kinds)


def _batch_figures(spans: list[StepSpans]) -> dict[str, float]:
    """Return each part of a step, and their sum."""
    return _percentiles(
        {
            "plan_ms": [span.plan_s for span in spans],
            "apply_ms": [span.apply_s for span in spans],
            "flatten_ms": [span.flatten_s for span in spans],
            "step_ms": [span.plan_s + span.apply_s + span.flatten_s for span in spans],
        }
    )


def _percentiles(kinds: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"{kind}_p{percent}": round(1e3 * percentile(values_s, percent), 3)
        for kind, values_s in kinds.items()
        for percent in (50, 99)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scheduler", description="What one scheduling step costs."
    )
    parser.add_argument("--steps", type=int, default=300, help="measured steps of every case")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        sys.exit(f"steps is {arguments.steps}: wanted at least 1")
    spans = {**measure(QUEUES, arguments.steps), **measure(OTHERS, arguments.steps)}
    figures = {name: _figures(each) for name, each in spans.items()}
    batches = measure(BATCHES, arguments.steps)
    figures |= {name: _batch_figures(each) for name, each in batches.items()}
    for case in BATCHES:
        print(f"overlapping {case.name}", file=sys.stderr)
        serial_s, overlapped_s = step_periods_s(case.num_running, arguments.steps)
        figures[case.name] |= _percentiles(
            {"serial_step_ms": serial_s, "overlapped_step_ms": overlapped_s}
        )
    ratios = {
        "w10000_over_w100": figures["w10000"]["plan_ms_p50"] / figures["w100"]["plan_ms_p50"],
        "w10000_over_w100_cpu": (
            figures["w10000"]["plan_cpu_ms_p50"] / figures["w100"]["plan_cpu_ms_p50"]
        ),
    }
    if arguments.json:
        print(json.dumps({**figures, **{name: round(r, 3) for name, r in ratios.items()}}))
        return
    for name, values in figures.items():
        print(f"{name:18}" + "".join(f"  {key} {value:7.3f}" for key, value in values.items()))
    for name, ratio in ratios.items():
        print(f"{name:22}{ratio:.3f}")


if __name__ == "__main__":
    main()
