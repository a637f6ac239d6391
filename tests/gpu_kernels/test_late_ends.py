"""Sequences that end, or fail, while the step that was begun with them has not run on the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip
from tests.gpu_kernels.late_device import LateDevice  # isort: skip

import pytest

from common.token_rules import TokenRules
from engine.core.runner_contract import SequencesFailed
from engine.core.step.step_in_flight import PlannedStep
from engine.runner.model_runner import ModelRunner
from tests.gpu_kernels.stepped_node import DRAWN, GREEDY, Node
from tests.support.engine.build import check_idle

FILTERED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "logprobs": 1}
LEFT: dict[str, Any] = {"temperature": 1.0, "top_p": 1 - 1e-13}
"""A row whose last kept token depends on the order of sums, so that the host draws it."""


@pytest.fixture
def runner(one_layer: Path, late_device: LateDevice) -> ModelRunner:
    return on_card(one_layer)


def step_with_the_next_behind(node: Node, device: LateDevice) -> PlannedStep:
    """Run a step; the card has done nothing of the one that is begun behind it."""
    step = node.step()
    assert step.batch.has_gone_on
    assert device.num_queued - device.num_done > 5, "the card has computed the next step"
    return step


def to_the_end(node: Node) -> None:
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    check_idle(node.scheduler)


def alone(runner: ModelRunner, length: int, max_tokens: int, seed: int, **ways: Any) -> list[Any]:
    """What a request draws on a node that waits for each step."""
    node = Node(runner, goes_on=False)
    node.add(length, max_tokens, seed, **ways)
    to_the_end(node)
    return [node.outputs[1], node.logprobs[1]]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("before", [GREEDY, FILTERED], ids=["greedy", "filtered"])
def test_blocks_and_seat_of_those_that_ended_are_given_away_while_the_card_still_writes_them(
    runner: ModelRunner, late_device: LateDevice, length: int, before: dict[str, Any]
) -> None:  # fmt: skip
    """All that ran are aborted: nothing is left of the step, which the card computes later."""
    node = Node(runner, goes_on=True, num_blocks=3)
    gone = node.add(14, 30, 1, **before)
    for _ in range(2):
        node.step()
    step_with_the_next_behind(node, late_device)
    seat, blocks = gone.seat, set(gone.block_table)
    num_drawn = len(node.outputs[1])
    node.scheduler.finish(gone)
    after = node.add(length, 6, 2, **DRAWN, logprobs=1)
    step = node.step()
    assert step.sequences == [after]
    assert step.batch.continues is None
    assert after.seat == seat
    assert blocks & set(after.block_table)
    to_the_end(node)
    assert [node.outputs[2], node.logprobs[2]] == alone(runner, length, 6, 2, **DRAWN, logprobs=1)
    assert len(node.outputs[1]) == num_drawn, "a token of a request that was aborted"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stays", [DRAWN, FILTERED], ids=["drawn", "filtered"])
def test_one_that_was_left_behind_is_aborted_and_a_third_one_takes_its_blocks(
    runner: ModelRunner, stays: dict[str, Any]
) -> None:
    """The card has written its next position with another token than the host then drew."""
    node = Node(runner, goes_on=True, num_blocks=4)
    gone = node.add(14, 30, 1, **LEFT)
    stay = node.add(6, 9, 3, **stays)
    for _ in range(2):
        node.step()
    assert node.results.left_behind == {0}
    seat, blocks = gone.seat, set(gone.block_table)
    node.scheduler.finish(gone)
    after = node.add(20, 6, 2, **DRAWN, logprobs=1)
    assert node.step().sequences == [stay]
    assert node.step().sequences == [stay, after]
    assert after.seat == seat
    assert blocks & set(after.block_table)
    to_the_end(node)
    assert [node.outputs[2], node.logprobs[2]] == alone(runner, 6, 9, 3, **stays)
    assert [node.outputs[3], node.logprobs[3]] == alone(runner, 20, 6, 2, **DRAWN, logprobs=1)


@pytest.mark.timeout(600)
def test_one_that_fails_when_the_next_step_is_begun_leaves_the_others_in_it(
    runner: ModelRunner,
) -> None:
    """It may draw 7 alone, and not twice in a row: after one token there is none."""
    node = Node(runner, goes_on=True)
    rules = TokenRules(allowed_token_ids=(7,), bad_words=((7, 7),))
    bad = node.add(5, 9, 1, **GREEDY, rules=rules)
    good = node.add(6, 9, 2, **FILTERED)
    node.step()
    step = node.scheduler.plan()
    with pytest.raises(SequencesFailed) as caught:
        runner.execute(step.batch)
    assert step.batch.has_gone_on
    assert list(caught.value.errors) == [0]
    node.take(step.only([1]), caught.value.results.only([1]))
    node.scheduler.finish(bad)
    step = node.step()
    assert step.sequences == [good]
    assert step.batch.continues is not None
    to_the_end(node)
    assert [node.outputs[2], node.logprobs[2]] == alone(runner, 6, 9, 2, **FILTERED)


@pytest.mark.timeout(600)
def test_buffers_are_there_until_the_step_that_was_begun_has_ended(
    runner: ModelRunner, late_device: LateDevice
) -> None:
    node = Node(runner, goes_on=True)
    node.add(5, 20, 1, **GREEDY)
    for _ in range(2):
        node.step()
    step_with_the_next_behind(node, late_device)
    decoder: Any = runner.decoder
    decoder.close()
    assert late_device.num_queued == late_device.num_done
