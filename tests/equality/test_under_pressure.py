"""The demo model answers alike however it is scheduled: policy × order × mode × method × steps.

Pools hold about half of what is asked for, so sequences are preempted all the time. Everyday runs
take a part in which every choice occurs, on one node or over a handoff; `--every-combination` takes
all of them, half with steps planned ahead. A decode node without local prefill recomputes in steps
of its own size, for each method.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from common.kv.token_budget import get_max_chunk_tokens
from common.nodes import Role
from common.request import GenerationRequest
from engine.runner.model_runner import ModelRunner
from pdserve.checkpoints.demo_model import demo_model_folder
from tests.equality.combinations import (
    LEAST_OUTPUT,
    NUM_OUTPUT,
    Combination,
    answers_alone,
    check_pressure,
    covering_choices,
    prefill_node,
    pressed_node,
)
from tests.equality.combinations import requests as requests
from tests.support.engine.choices import FREE_METHODS, MODES, ORDERS, RESERVATIONS
from tests.support.models.pressure import (
    NUM_DRAFTS,
    answer_together,
    answer_with_handoff,
    demo_runners,
    load_runner,
    mirrored_runner,
)

NUM_SEATS = 4
STEPS = ("sync", "async")
COLUMNS = (RESERVATIONS, ORDERS, MODES, FREE_METHODS)
EVERYDAY_WAYS = [("recompute", "mtp"), ("swap", "none")]
"""How a node without local prefill preempts and drafts in everyday runs."""


def every_combination() -> list[Combination]:
    """Every policy × order × mode × method, by turns with and without steps planned ahead.

    The turn is the parity of all four choices, so each pair of them occurs with both.
    """
    rows: list[Combination] = []
    for choices in product(*(enumerate(column) for column in COLUMNS)):
        turn = sum(number for number, _ in choices) % len(STEPS)
        reservation, order, mode, method = (name for _, name in choices)
        rows.append((reservation, order, mode, method, STEPS[turn]))
    return rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_all = metafunc.config.getoption("--every-combination")
    if "combination" in metafunc.fixturenames:
        rows = every_combination()
        if not is_all:
            is_handoff = metafunc.function is test_prefill_to_decode
            rows = covering_choices(rows)[is_handoff::2]
        metafunc.parametrize("combination", rows, ids="-".join)
    if "mode" in metafunc.fixturenames:
        ways = list(product(MODES, FREE_METHODS)) if is_all else EVERYDAY_WAYS
        metafunc.parametrize(("mode", "method"), ways)
    elif "method" in metafunc.fixturenames:
        metafunc.parametrize("method", FREE_METHODS if is_all else ["mtp"])


@pytest.fixture(scope="module")
def runners() -> tuple[ModelRunner, ModelRunner]:
    """The second one has a mirrored cache: its swapped KV is copied beside the steps."""
    return demo_runners()[0], mirrored_runner()


@pytest.fixture(scope="module")
def undisturbed(
    runners: tuple[ModelRunner, ModelRunner], requests: list[GenerationRequest]
) -> list[list[int]]:
    """Answer one request at a time, in a pool that is large enough, without speculation."""
    answers = answers_alone(runners[0], requests)
    assert LEAST_OUTPUT < len(answers[1]) <= NUM_OUTPUT
    return answers


def test_one_node(
    combination: Combination,
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    node = pressed_node(runners[0], combination)
    assert answer_together(node, requests) == undisturbed
    check_pressure(node, combination)


@pytest.mark.covers("F46")
def test_prefill_to_decode(
    combination: Combination,
    runners: tuple[ModelRunner, ModelRunner],
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    prefill = prefill_node(runners[0], combination)
    decode = pressed_node(runners[1], combination)
    assert answer_with_handoff(prefill, decode, requests) == undisturbed
    check_pressure(decode, combination)


def largest_step(method: str) -> int:
    """Tokens of the largest step of a decode node without local prefill."""
    return get_max_chunk_tokens(
        Role.DECODE,
        max_num_seqs=NUM_SEATS,
        max_num_batched_tokens=512,
        tokens_per_seq=1 if method == "none" else 1 + NUM_DRAFTS,
        has_local_prefill=False,
    )


@pytest.fixture(scope="module")
def small_runner() -> ModelRunner:
    """A runner for no larger steps than those of a decode node without local prefill."""
    return load_runner(demo_model_folder(), NUM_DRAFTS, max_chunk_tokens=largest_step("mtp"))


@pytest.mark.covers("S09")
def test_recomputing_in_the_steps_of_a_node_without_local_prefill(
    mode: str,
    method: str,
    runners: tuple[ModelRunner, ModelRunner],
    small_runner: ModelRunner,
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    combination = ("none", "last_in_first_out", mode, method, "sync")
    most = largest_step(method)
    prefill = prefill_node(runners[0], combination)
    decode = pressed_node(small_runner, combination, budget=most)
    assert answer_with_handoff(prefill, decode, requests) == undisturbed
    check_pressure(decode, combination)
    assert decode.largest_step <= most
    if mode == "recompute":
        counted = decode.scheduler.statistics().counters
        assert counted.num_recomputed_tokens > most * counted.num_preemptions, "never in chunks"


@pytest.mark.covers("S09")
def test_continuing_on_a_node_without_local_prefill(
    method: str,
    small_runner: ModelRunner,
    requests: list[GenerationRequest],
    undisturbed: list[list[int]],
) -> None:
    """Another node began these requests: their prompts and answers so far are computed here."""
    combination = ("none", "last_in_first_out", "recompute", method, "sync")
    most = largest_step(method)
    node = pressed_node(small_runner, combination, budget=most)
    begun = [
        replace(request, output_token_ids=tuple(answer[: 3 + 4 * i]))
        for i, (request, answer) in enumerate(zip(requests, undisturbed, strict=True))
    ]
    assert answer_together(node, begun) == undisturbed
    check_pressure(node, combination)
    assert node.largest_step <= most
