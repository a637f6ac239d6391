"""The steps that nodes ran, from their recordings (`--record`), beside what a profile says of them.

A step lasts from its planning to the next one's: with applying its results and sending its tokens,
as a step of a plan does. Times are those of the machine's monotonic clock, which its processes
share.

What a step should have taken follows from what else ran: `done_s` is the work that the profile's
machine does in the time that the real step took, beside the real steps of the other nodes, by the
same rule as in a plan (`SharedCores`), and `work_s` the work of the step. Of the machine as it was
when it was profiled both are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.recording.file import read_recording
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from simulator.profile import DeviceProfile
from simulator.profiles.shared_cores import PacedStep, SharedCores

_IS_BESIDE = 0.5
"""A step of whose time so much passed beside steps of other nodes is one beside others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step of a node: tokens of each entry, and the tokens before these; seconds."""

    begin_s: float
    end_s: float
    num_tokens: tuple[int, ...]
    starts: tuple[int, ...]
    is_pushed: bool = False
    """Whether its layers were handed over to another node."""

    @property
    def has_prompts(self) -> bool:
        """Whether any entry computes more than a token."""
        return any(count > 1 for count in self.num_tokens)


class TimedStep(NamedTuple):
    """When a step was run, its work, the work that a profile says can be done then, its kind."""

    begin_s: float
    end_s: float
    work_s: float
    done_s: float
    kind: str


def read_steps(folder: Path) -> list[RecordedStep]:
    """Return the steps of all nodes that recorded in a folder, by their begins; routers have none.

    Raises `ConfigError` for a recording that cannot be read.
    """
    found = [step for path in folder.glob("*.jsonl") for step in _steps_of(path)]
    return sorted(found, key=lambda one: one.begin_s)


def timed_steps(
    steps: Sequence[RecordedStep], profile: DeviceProfile, at_once: int
) -> list[TimedStep]:
    """Return the steps of all nodes of a machine that runs `at_once` of them at full speed."""
    cores = SharedCores(at_once, profile.beside.slowdowns)
    works_s = [_work_s(one, profile) for one in steps]
    events = sorted(
        event
        for index, one in enumerate(steps)
        for event in ((one.begin_s, True, index), (one.end_s, False, index))
    )
    under_way: dict[int, PacedStep] = {}
    beside_s, done_s = [0.0] * len(steps), [0.0] * len(steps)
    before_s = 0.0
    for now_s, is_begin, index in events:
        if len(under_way) > 1:
            for one in under_way:
                beside_s[one] += now_s - before_s
        before_s = now_s
        if is_begin:
            is_prompt = steps[index].has_prompts
            under_way[index] = cores.begin(
                works_s[index], _nobody_is_told, now_s, computes_prompts=is_prompt
            )
        else:
            paced = under_way.pop(index)
            cores.end(paced, now_s)
            done_s[index] = paced.work_s - paced.left_s
    return [
        TimedStep(one.begin_s, one.end_s, work_s, done, _kind_of(one, beside))
        for one, work_s, done, beside in zip(steps, works_s, done_s, beside_s, strict=True)
    ]


def _steps_of(path: Path) -> Iterator[RecordedStep]:
    _, lines = read_recording(path)
    plan: dict[str, Any] = {}
    begin_s, is_pushed, has_ended = 0.0, False, False
    for _, line in lines:
        match line.get("call"):
            case "begin_step":
                if plan.get("ids") and has_ended:
                    yield RecordedStep(
                        begin_s=begin_s,
                        end_s=line["now_s"],
                        num_tokens=tuple(plan["tokens"]),
                        starts=tuple(plan["starts"]),
                        is_pushed=is_pushed,
                    )
                plan = line.get("gave", {}).get("plan", {})
                begin_s, is_pushed, has_ended = line["now_s"], False, False
            case "pushes":
                is_pushed = line.get("gave", {}).get("of_layers", False)
            case "end_step":
                has_ended = True


def _work_s(step: RecordedStep, profile: DeviceProfile) -> float:
    """Return the seconds that a profile says of a step alone."""
    batch = batch_of(
        [
            ScheduledSequence(index, [0] * count, start, (), None)
            for index, (count, start) in enumerate(zip(step.num_tokens, step.starts, strict=True))
        ]
    )
    return profile.step.step_s(batch) + step.is_pushed * profile.beside.push_s


def _kind_of(step: RecordedStep, beside_s: float) -> str:
    """Return what a step computes, and whether other nodes compute meanwhile."""
    kind = "prompts" if step.has_prompts else "1 answer"
    if kind == "1 answer" and len(step.num_tokens) > 1:
        kind = "answers"
    is_beside = beside_s > _IS_BESIDE * (step.end_s - step.begin_s)
    return f"{kind}, beside" if is_beside else kind


def _nobody_is_told() -> None:
    """Do nothing: the ends of recorded steps do not move."""
