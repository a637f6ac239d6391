"""A runner that goes on by itself, in the interpreter: the same tokens, and what steps launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip
from tests.gpu_kernels.interpreted_runner import FAMILIES, on_card  # isort: skip

import numpy as np
import pytest

from common.errors import InternalError
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import DeviceLost, SequencesFailed
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.step.step_in_flight import PlannedStep
from engine.runner.gpu.cuda_driver import GpuError
from engine.runner.model_runner import ModelRunner
from tests.support.engine.build import check_books, check_idle, make_request
from tests.support.models.tiny_checkpoints import prompt_of, write_checkpoint

pytestmark = pytest.mark.usefixtures("interpreted_card")
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0}
FILTERED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), FAMILIES["qwen2"])


class Node:
    """A scheduler on a runner, driven as the step loop does it."""

    def __init__(self, runner: ModelRunner, *, goes_on: bool, num_blocks: int = 16) -> None:
        self.runner = runner
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=4, max_num_batched_tokens=64, block_size=16, max_model_len=64
            ),
            num_blocks=num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=frozenset(),
            can_go_on=goes_on and runner.can_go_on,
        )
        self.outputs: dict[int, list[int]] = {}

    def add(self, length: int, max_tokens: int, seed: int, **sampling: Any) -> Sequence:
        sampling = {"max_tokens": max_tokens, "seed": seed, "ignore_eos": True, **sampling}
        request = make_request(tuple(prompt_of(length, seed)), **sampling)
        sequence = Sequence(len(self.outputs) + 1, request)
        self.outputs[sequence.sequence_id] = []
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> PlannedStep:
        step = self.scheduler.plan()
        check_books(self.scheduler)
        results = self.runner.execute(step.batch)
        self.scheduler.plan_ahead(step)
        for output in self.scheduler.apply(step, results):
            self.outputs[output.sequence.sequence_id] += output.token_ids
        check_books(self.scheduler)
        return step

    @property
    def num_begun(self) -> int:
        return self.scheduler.statistics().counters.plans_ahead["begun"]


def stop_token(runner: ModelRunner) -> int:
    """Return a token that ends the third output of `answers` in the middle."""
    node = Node(runner, goes_on=False)
    node.add(5, 6, 3, **DRAWN)
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    [output] = node.outputs.values()
    return next(token for token in output[2:] if output.index(token) >= 2)


def answers(
    runner: ModelRunner, stop_token_id: int, *, goes_on: bool
) -> tuple[list[list[int]], int]:
    """Return the outputs of requests that come and end at any time, and the steps begun early.

    One ends by its token, one by its length as a block ends, one is aborted and two come later.
    """
    node = Node(runner, goes_on=goes_on)
    node.add(14, 4, 1, **GREEDY)
    node.add(13, 9, 2, **DRAWN)
    node.add(5, 9, 3, **DRAWN, stop_token_ids=(stop_token_id,))
    for count in range(20):
        if count == 5:
            gone = node.add(3, 8, 4, **DRAWN)
        if count == 8:
            node.scheduler.finish(gone)
            node.add(4, 3, 5, **FILTERED, **PENALISED)
        if node.scheduler.running or node.scheduler.waiting:
            node.step()
    check_idle(node.scheduler)
    return list(node.outputs.values()), node.num_begun


@pytest.mark.timeout(600)
def test_tokens_are_the_same_whether_it_goes_on_or_not(folder: Path) -> None:
    runner = on_card(folder)
    ends = stop_token(runner)
    alone, num_none = answers(runner, ends, goes_on=False)
    ahead, num_begun = answers(runner, ends, goes_on=True)
    assert 2 < len(alone[2]) < 9, "it ends by a token, in the middle"
    assert ahead[:3] + ahead[4:] == alone[:3] + alone[4:]
    shorter = min(len(ahead[3]), len(alone[3]))
    assert shorter > 0
    assert ahead[3][:shorter] == alone[3][:shorter]
    assert num_none == 0
    assert num_begun >= 4


def watch(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the copies, graphs and waits of a runner's steps."""
    calls: list[str] = []
    steps: Any = runner.decoder.steps  # type: ignore[attr-defined]
    device: InterpretedDevice = steps._device

    def recorded(owner: Any, name: str, shown: str) -> None:
        plain = getattr(owner, name)

        def call(*given: Any) -> Any:
            calls.append(shown)
            return plain(*given)

        monkeypatch.setattr(owner, name, call)

    for name in ("copy", "synchronize", "upload", "download"):
        recorded(device, name, name)
    for side, event in enumerate(steps._events):
        recorded(event, "wait", f"wait {side}")
        recorded(event, "record", f"record {side}")
    for graph in steps._graphs.values():
        recorded(graph, "launch", "graph")
    return calls


def test_a_steady_step_is_one_graph_and_two_copies_behind_the_one_that_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(on_card(folder), goes_on=True)
    node.add(5, 20, 1, **GREEDY)
    node.add(6, 20, 2, **DRAWN)
    for _ in range(3):
        node.step()
    calls = watch(node.runner, monkeypatch)
    node.step()
    first = calls.copy()
    node.step()
    # The step behind is queued whole, and then only the tokens of the one before are waited for.
    assert [call.split()[0] for call in first] == ["copy", "graph", "copy", "record", "wait"]
    assert first[-2][-1] != first[-1][-1]
    assert [call.split()[0] for call in calls[5:]] == [call.split()[0] for call in first]
    assert calls[-1] == f"wait {first[-2][-1]}"


def test_rows_under_rules_do_not_go_on(folder: Path) -> None:
    """They are drawn from the step's logits, which the step behind it would overwrite."""
    node = Node(on_card(folder), goes_on=True)
    node.add(5, 8, 1, **GREEDY)
    node.add(6, 4, 2, **FILTERED)
    for _ in range(3):
        assert not node.step().batch.has_gone_on
    while len(node.scheduler.running) == 2:
        assert not node.step().batch.has_gone_on
    assert node.step().batch.has_gone_on


def test_rows_that_are_not_finite_end_as_in_any_other_step(folder: Path) -> None:
    node = Node(on_card(folder), goes_on=True)
    node.add(5, 20, 1, **GREEDY)
    for _ in range(3):
        node.step()
    decoder: Any = node.runner.decoder
    not_a_number = np.full(decoder.spec.hidden_size, 0x7FC0, np.uint16)
    decoder._device.upload_array(decoder.launches.weights.final_norm, not_a_number)
    node.step()  # its tokens were drawn before
    with pytest.raises(SequencesFailed, match="not finite"):
        node.step()


def test_a_card_that_is_lost_in_a_step_that_was_begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(on_card(folder), goes_on=True)
    node.add(5, 20, 1, **GREEDY)
    for _ in range(3):
        node.step()
    steps: Any = node.runner.decoder.steps  # type: ignore[attr-defined]

    def lost() -> None:
        raise GpuError("cuEventSynchronize: an illegal memory access was encountered (700)")

    for event in steps._events:
        monkeypatch.setattr(event, "wait", lost)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        node.step()


def test_a_batch_that_is_not_the_step_that_was_begun_is_a_bug(folder: Path) -> None:
    node = Node(on_card(folder), goes_on=True)
    node.add(5, 20, 1, **GREEDY)
    node.add(6, 20, 2, **GREEDY)
    for _ in range(3):
        node.step()
    step = node.scheduler.plan()
    assert step.batch.continues is not None
    step.batch.continues = step.batch.continues[::-1].copy()
    with pytest.raises(InternalError, match="the step that was begun writes slots"):
        node.runner.execute(step.batch)


def test_an_offer_without_blocks_is_a_bug(folder: Path) -> None:
    node = Node(on_card(folder), goes_on=False)
    node.add(14, 20, 1, **GREEDY)
    node.step()
    node.step()
    step = node.scheduler.plan()
    assert step.batch.starts.tolist() == [15]
    step.batch.going_on = np.zeros(1, np.int64)
    with pytest.raises(InternalError, match="without a block for every row"):
        node.runner.execute(step.batch)
