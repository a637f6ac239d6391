"""Where a burst of outputs is cut into parts, which messages wait for further calls, and how long a
stream waits before it is opened again."""

from __future__ import annotations

from itertools import groupby

import pytest

from common.ids import AttemptId
from common.request import RequestOutput
from router.dispatch.client.fairness import (
    FEW_REQUESTS,
    MESSAGE_SPACING_S,
    OUTPUTS_AT_MOST,
    OUTPUTS_AT_ONCE,
    PARTS,
    message_pause_s,
    part_end,
    part_size,
)
from router.dispatch.client.node_clients import FIRST_BACKOFF_S, LAST_BACKOFF_S, backoff_s


def burst(*runs: int) -> list[RequestOutput]:
    """Outputs of requests that follow each other, so many of each in a row."""
    return [
        RequestOutput(AttemptId(f"r{number}", 1), index)
        for number, run in enumerate(runs)
        for index in range(run)
    ]


def parts_of(outputs: list[RequestOutput], size: int) -> list[list[RequestOutput]]:
    parts = []
    while outputs:
        end = part_end(outputs, size)
        parts.append(outputs[:end])
        outputs = outputs[end:]
    return parts


def num_pushes(parts: list[list[RequestOutput]]) -> int:
    """Pieces of answers in all parts: each is one write to a client."""
    return sum(len(list(groupby(part, key=lambda output: output.id))) for part in parts)


def test_whole_answers_are_cut_as_rarely_as_can_be() -> None:
    parts = parts_of(burst(*[63] * 10), 32)
    assert [len(part) for part in parts] == [32, 31] * 10
    assert num_pushes(parts) == 20


@pytest.mark.parametrize("run", [1, 2, 15, 16, 17, 31, 32, 33, 63, 500])
@pytest.mark.parametrize("size", [1, 2, 32, 512])
def test_parts_hold_everything_in_order_and_are_neither_too_large_nor_many(
    run: int, size: int
) -> None:
    outputs = burst(*[run] * 20)
    parts = parts_of(outputs, size)
    assert [output for part in parts for output in part] == outputs
    assert all(size // 2 < len(part) <= size for part in parts[:-1])


def test_a_step_of_many_requests_is_cut_at_the_size() -> None:
    assert [len(part) for part in parts_of(burst(*[1] * 100), 32)] == [32, 32, 32, 4]


def test_an_answer_that_begins_early_in_a_part_does_not_end_it() -> None:
    assert [len(part) for part in parts_of(burst(3, 500), 32)][:2] == [32, 32]


def test_what_fits_into_a_part_is_not_cut() -> None:
    assert part_end(burst(16, 16), 32) == 32
    assert part_end([], 32) == 0


def test_a_message_waits_for_further_calls_only_behind_another_one_and_under_load() -> None:
    many = FEW_REQUESTS + 1
    assert message_pause_s(many, 0.0) == MESSAGE_SPACING_S
    assert message_pause_s(many, 0.001) == pytest.approx(MESSAGE_SPACING_S - 0.001)
    assert message_pause_s(many, MESSAGE_SPACING_S) == 0.0
    assert message_pause_s(many, 60.0) == 0.0
    assert message_pause_s(FEW_REQUESTS, 0.0) == 0.0


def test_parts_grow_with_the_requests_up_to_a_bound() -> None:
    sizes = [part_size(num_running, 100) for num_running in range(3 * OUTPUTS_AT_MOST)]
    assert sizes == sorted(sizes)
    assert sizes[:33] == [OUTPUTS_AT_ONCE] * 33
    assert (sizes[64], sizes[128], sizes[500]) == (128, OUTPUTS_AT_MOST, OUTPUTS_AT_MOST)
    assert sizes[1000] == 1000, "a token of every request"
    assert part_size(1, 2 * OUTPUTS_AT_MOST * PARTS) == 2 * OUTPUTS_AT_MOST


def test_the_pause_between_tries_grows_to_a_bound() -> None:
    pauses = [backoff_s(count) for count in range(100)]
    assert pauses[0] == FIRST_BACKOFF_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LAST_BACKOFF_S
