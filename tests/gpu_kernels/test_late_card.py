"""A node on a card that answers late: the host runs ahead of it, and no thread waits but one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card  # isort: skip
from tests.gpu_kernels.late_device import LateDevice  # isort: skip

import pytest

from common.observing.clock import MonotonicClock
from engine.core import step_after
from engine.execution import ExecutionThread
from tests.gpu_kernels.stepped_node import (
    DRAWN,
    GREEDY,
    UNDER_GRAMMAR,
    Node,
    all_kinds,
    drafts_that_never_pay,
    stop_token,
    with_grammars,
)
from tests.support.engine.speculation_views import GuessedDrafts


@pytest.mark.timeout(600)
def test_rows_of_every_kind_draw_the_same_tokens_on_a_card_that_is_behind(
    one_layer: Path, late_device: LateDevice
) -> None:
    """And have the same log probabilities, to the last bit.

    Nothing that the card has not read yet is overwritten, and nothing is read too early.
    """
    runner = with_grammars(on_card(one_layer))
    ends = stop_token(runner)
    alone, ahead = (Node(runner, goes_on=goes_on) for goes_on in (False, True))
    assert all_kinds(ahead, ends) == all_kinds(alone, ends)
    assert alone.num_begun == 0
    assert ahead.num_begun >= 10


@pytest.mark.timeout(600)
def test_so_they_do_on_a_node_that_drafts_where_steps_are_begun_between_drafts(
    one_layer: Path, late_device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens and log probabilities of a node that waits for each step, and drafts nothing."""
    monkeypatch.setattr(step_after, "STEPS_WITHOUT_DRAFTS", 1)
    runner = with_grammars(on_card(one_layer, num_drafts=3))
    ends = stop_token(runner)
    right = all_kinds(Node(runner, goes_on=False), ends)
    guesses: Any = GuessedDrafts(
        lambda one: right[one.sequence_id - 1],
        most=3, share=0.1, seed=2, vocab_size=runner.vocab_size,
    )  # fmt: skip
    node = Node(runner, goes_on=True, speculation=guesses)
    assert all_kinds(node, ends) == right
    counters = node.scheduler.statistics().counters
    assert 0 < counters.num_accepted < counters.num_drafted
    assert node.num_begun >= 4


def check_that_no_step_waits(node: Node, device: LateDevice) -> None:
    """While the card has done nothing of a step, the next one is queued and all is reported."""
    execution = ExecutionThread(node.runner, MonotonicClock())
    for _ in range(2):
        step, num_graphs = node.scheduler.plan(), device.num_graphs
        with device.held():
            num_done = device.num_done
            execution.begin(step.batch, None)
            execution.wait_until_queued()
            assert step.batch.has_gone_on
            node.scheduler.plan_ahead(step)
            device.wait_for_graphs(num_graphs + 1)
            assert device.num_done <= num_done + 1  # what had begun by then
        results, _ = execution.wait()
        assert device.num_graphs == num_graphs + 1
        node.take(step, results)
    execution.close()


@pytest.mark.timeout(600)
def test_beside_a_row_under_a_grammar_the_step_thread_waits_for_nothing(
    one_layer: Path, late_device: LateDevice
) -> None:
    node = Node(with_grammars(on_card(one_layer)), goes_on=True)
    node.add(5, 20, 1, **GREEDY)
    node.add(6, 20, 2, **DRAWN)
    node.add(9, 20, 7, **UNDER_GRAMMAR)
    for _ in range(3):
        node.step()
    check_that_no_step_waits(node, late_device)


@pytest.mark.timeout(600)
def test_nor_does_it_on_a_node_that_drafts_whose_rows_have_no_drafts(
    one_layer: Path, late_device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_after, "STEPS_WITHOUT_DRAFTS", 2)
    node = Node(on_card(one_layer), goes_on=True, speculation=drafts_that_never_pay())
    node.add(5, 20, 1, **GREEDY)
    node.add(6, 20, 2, **DRAWN)
    for _ in range(4):
        node.step()
    check_that_no_step_waits(node, late_device)
