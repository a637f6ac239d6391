"""A runner that goes on by itself, in the interpreter: the same tokens, and what steps launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedEvent, InterpretedGraph  # isort: skip
from tests.gpu_kernels.interpreted_runner import FAMILIES, on_card  # isort: skip

import numpy as np
import pytest

from common.errors import InternalError
from common.token_rules import ThinkingBudget, TokenRules
from engine.core import step_after
from engine.core.runner_contract import DeviceLost, SequencesFailed
from engine.runner.gpu.cuda_driver import GpuError
from engine.runner.model_runner import ModelRunner
from tests.gpu_kernels.stepped_node import (
    DRAWN,
    FILTERED,
    GREEDY,
    PENALISED,
    UNDER_GRAMMAR,
    Node,
    drafts_that_never_pay,
    stop_token,
    with_grammars,
)
from tests.support.engine.build import check_idle
from tests.support.engine.speculation_views import GuessedDrafts
from tests.support.grammars.printable_tokens import text_of
from tests.support.models.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.usefixtures("interpreted_card")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer."""
    config = FAMILIES["qwen2"] | {"num_hidden_layers": 1}
    return write_checkpoint(tmp_path_factory.mktemp("model"), config)


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
    decoder: Any = runner.decoder
    device: InterpretedDevice = decoder.device
    of_tokens: list[InterpretedEvent] = []

    def recorded(owner: Any, name: str, shown: Callable[..., str]) -> None:
        plain = getattr(owner, name)

        def call(*given: Any) -> Any:
            calls.append(shown(*given))
            return plain(*given)

        monkeypatch.setattr(owner, name, call)

    def is_host(address: int) -> bool:
        return any(one.address <= address < one.address + one.num_bytes for one in device.pinned)

    def way(to: int, source: int, *_: int) -> str:
        return "to the host" if is_host(to) else "to the card" if is_host(source) else "on the card"

    recorded(device, "copy", way)
    for name in ("synchronize", "upload", "download"):
        recorded(device, name, lambda *_, name=name: name)
    recorded(InterpretedGraph, "launch", lambda *_: "graph")

    # An event behind what goes to the card is of the numbers there, not of tokens.
    def record(event: InterpretedEvent, stream: int) -> None:
        if calls[-1:] == ["to the host"]:
            of_tokens.append(event)
            calls.append("record")

    def wait(event: InterpretedEvent) -> None:
        if event in of_tokens:
            calls.append("wait")

    monkeypatch.setattr(InterpretedEvent, "record", record)
    monkeypatch.setattr(InterpretedEvent, "wait", wait)
    return calls


TOKENS_AND_STEP_BEHIND = ["to the host", "record", "graph", "wait"]


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
    node.step()
    # The step behind is queued whole, and then only the tokens of the one before are waited for.
    assert calls == 2 * ["to the card", *TOKENS_AND_STEP_BEHIND]


MORE_COPIES: list[tuple[dict[str, Any], list[str]]] = [
    (UNDER_GRAMMAR, ["on the card"]),
    (FILTERED, ["on the card"]),
    ({"logprobs": 2}, ["to the host"]),
    ({"frequency_penalty": 0.5}, ["to the card"]),
]
"""What the draw of a row takes beside one copy each way."""


@pytest.mark.timeout(600)
def test_a_row_of_any_kind_holds_nobody_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, a copy each way and what only its draw takes; no wait behind the tokens."""
    runner = with_grammars(on_card(folder))
    for sampling, more in MORE_COPIES:
        node = Node(runner, goes_on=True)
        node.add(5, 20, 1, **GREEDY)
        node.add(6, 20, 2, **DRAWN)
        node.add(9, 20, 7, **sampling)
        for _ in range(3):
            node.step()
        with monkeypatch.context() as watched:
            calls = watch(runner, watched)
            step = node.step()
        assert step.batch.has_gone_on
        assert len(step.batch) == 3
        assert calls == ["to the card", *more, *TOKENS_AND_STEP_BEHIND], sampling


@pytest.mark.timeout(600)
def test_thinking_ends_in_a_step_that_was_begun_early(folder: Path) -> None:
    """The row is edited in that step alone: its graph drew what the model would have had."""
    rules = TokenRules(thinking=ThinkingBudget(num_tokens=4, end_token_id=77))
    outputs = []
    for goes_on in (False, True):
        node = Node(on_card(folder), goes_on=goes_on)
        node.add(5, 9, 1, **DRAWN, rules=rules)
        node.add(6, 9, 2, **GREEDY)
        while node.scheduler.running or node.scheduler.waiting:
            node.step()
        outputs.append(node.outputs)
    assert outputs[0] == outputs[1]
    assert outputs[0][1].index(77) == 4
    assert node.num_begun >= 6


@pytest.mark.timeout(600)
def test_a_row_under_a_grammar_has_the_tokens_that_it_has_alone(folder: Path) -> None:
    runner = with_grammars(on_card(folder))
    alone = Node(runner, goes_on=False)
    alone.add(9, 7, 7, **UNDER_GRAMMAR | DRAWN)
    among = Node(runner, goes_on=True)
    for seed in range(3):
        among.add(5 + seed, 8, seed, **DRAWN)
    among.add(9, 7, 7, **UNDER_GRAMMAR | DRAWN)
    for node in (alone, among):
        while node.scheduler.running or node.scheduler.waiting:
            node.step()
    assert among.outputs[4] == alone.outputs[1]
    assert re.fullmatch("(ab|cd){3}[ac]", text_of(alone.outputs[1]))
    assert among.num_begun == 6


@pytest.mark.timeout(600)
def test_rows_without_drafts_hold_nobody_back_on_a_node_that_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph and a copy each way, as on a node that does not draft."""
    monkeypatch.setattr(step_after, "STEPS_WITHOUT_DRAFTS", 2)
    node = Node(on_card(folder), goes_on=True, speculation=drafts_that_never_pay())
    node.add(5, 20, 1, **GREEDY)
    node.add(6, 20, 2, **DRAWN)
    for _ in range(2):
        node.step()
    assert node.num_begun == 0
    node.step()
    node.step()
    calls = watch(node.runner, monkeypatch)
    step = node.step()
    assert step.batch.has_gone_on
    assert calls == ["to the card", *TOKENS_AND_STEP_BEHIND]
    assert node.num_begun == 2


def drafting(runner: ModelRunner, ways: Sequence[dict[str, Any]]) -> tuple[Node, list[list[int]]]:
    """Return a node with a request for each of `ways`, each of whose steps verifies drafts.

    And the outputs that these requests have without drafts.
    """
    plain = Node(runner, goes_on=False)
    guessed: Any = GuessedDrafts(
        lambda one: plain.outputs[one.sequence_id],
        most=3, share=1.0, seed=2, vocab_size=runner.vocab_size,
    )  # fmt: skip
    node = Node(runner, goes_on=True, speculation=guessed)
    for one in (plain, node):
        for seed, sampling in enumerate(ways):
            one.add(5 + seed, 9, seed, **sampling)
    while plain.scheduler.running or plain.scheduler.waiting:
        plain.step()
    return node, list(plain.outputs.values())


@pytest.mark.timeout(600)
def test_a_step_that_verifies_drafts_is_one_graph_and_a_copy_each_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more rows than the node has seats, of three sequences."""
    runner = on_card(folder, num_drafts=3)
    node, right = drafting(runner, (GREEDY, DRAWN, DRAWN))
    node.step()
    with monkeypatch.context() as watched:
        calls = watch(runner, watched)
        step = node.step()
    assert min(step.batch.num_drafts) > 0
    assert sum(step.batch.num_tokens) > 4
    assert calls == ["to the card", "graph", "to the host", "record", "wait"]
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    assert list(node.outputs.values()) == right


LEFT: dict[str, Any] = {"temperature": 1.0, "top_p": 1 - 1e-13}
"""A row whose last kept token depends on the order of sums, so that the host draws it."""


def with_a_left_row(runner: ModelRunner, *, goes_on: bool) -> tuple[Node, list[int]]:
    """Return a node that has answered a greedy request and one that the host draws.

    And how many rows were left behind in each of its steps.
    """
    node = Node(runner, goes_on=goes_on)
    node.add(5, 7, 1, **GREEDY)
    node.add(6, 4, 2, **LEFT)
    num_left = []
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
        num_left.append(len(node.results.left_behind))
    check_idle(node.scheduler)
    return node, num_left


@pytest.mark.timeout(600)
def test_a_row_that_the_host_draws_is_left_behind_once(folder: Path) -> None:
    """The others go on without it; while it goes on being such a row, no step is begun for it."""
    runner = on_card(folder)
    ahead, num_left = with_a_left_row(runner, goes_on=True)
    alone, num_none = with_a_left_row(runner, goes_on=False)
    assert ahead.outputs == alone.outputs
    assert num_left[:3] == [0, 1, 0]
    assert sum(num_left) == 1
    assert sum(num_none) == 0
    assert ahead.num_begun >= 2


@pytest.mark.timeout(600)
def test_rows_of_drafts_that_the_host_draws_are_those_of_single_steps(folder: Path) -> None:
    """They are the last ones of the step."""
    node, right = drafting(on_card(folder, num_drafts=3), (GREEDY, LEFT))
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    assert list(node.outputs.values()) == right


def test_rows_that_are_not_finite_end_as_in_any_other_step(folder: Path) -> None:
    node = Node(on_card(folder), goes_on=True)
    node.add(5, 20, 1, **GREEDY)
    for _ in range(3):
        node.step()
    decoder: Any = node.runner.decoder
    not_a_number = np.full(decoder.spec.hidden_size, 0x7FC0, np.uint16)
    decoder.device.upload_array(decoder.launches.weights.final_norm, not_a_number)
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

    monkeypatch.setattr(steps, "tokens", lost)
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
