"""The transition table: what is allowed, and that everything else is refused."""

from __future__ import annotations

from itertools import product

import pytest

from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import TRANSITIONS, SequenceStatus, check_transition
from tests.support.engine.build import make_request

_S = SequenceStatus
ALLOWED = {
    (_S.WAITING, _S.RUNNING_PREFILL),
    (_S.WAITING, _S.WAITING_FOR_KV),
    (_S.WAITING_FOR_KV, _S.RUNNING_DECODE),
    (_S.RUNNING_PREFILL, _S.RUNNING_DECODE),
    (_S.RUNNING_PREFILL, _S.EXPORTING),
    (_S.RUNNING_DECODE, _S.PREEMPTED),
    (_S.RUNNING_DECODE, _S.EXPORTING),
    (_S.PREEMPTED, _S.RUNNING_PREFILL),
    (_S.PREEMPTED, _S.RUNNING_DECODE),
    (_S.PREEMPTED, _S.SWAPPING_IN),
    (_S.SWAPPING_IN, _S.RUNNING_DECODE),
    (_S.SWAPPING_IN, _S.PREEMPTED),
    *((old, _S.FINISHED) for old in _S if old is not _S.FINISHED),
}


@pytest.mark.covers("S16")
@pytest.mark.parametrize(("old", "new"), list(product(_S, _S)))
def test_each_transition_is_allowed_or_refused_by_name(
    old: SequenceStatus, new: SequenceStatus
) -> None:
    if (old, new) in ALLOWED:
        check_transition(old, new)
    else:
        with pytest.raises(ValueError, match=f"from {old.value} to {new.value}"):
            check_transition(old, new)


def test_the_table_has_a_row_for_every_status() -> None:
    assert set(TRANSITIONS) == set(SequenceStatus)


def test_a_refused_move_leaves_the_status_as_it_was() -> None:
    sequence = Sequence(1, make_request(3))
    with pytest.raises(ValueError, match="running_decode"):
        sequence.move_to(SequenceStatus.RUNNING_DECODE)
    assert sequence.status is SequenceStatus.WAITING


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 3, [10, 11, 12]),
        (1, 2, [11]),
        (2, 4, [12, 20]),
        (3, 5, [20, 21]),
        (4, 5, [21]),
        (0, 5, [10, 11, 12, 20, 21]),
        (3, 3, []),
        (5, 5, []),
    ],
)
def test_known_tokens_run_from_the_prompt_into_the_output(
    start: int, end: int, expected: list[int]
) -> None:
    sequence = Sequence(1, make_request((10, 11, 12)))
    sequence.append([20, 21])
    assert list(sequence.tokens(start, end)) == expected
    assert (sequence.num_known, sequence.num_uncomputed) == (5, 5)
    assert sequence.num_output == 2


def test_the_next_draw_sees_its_index_and_both_token_lists() -> None:
    sequence = Sequence(1, make_request((10, 11, 12), seed=9))
    sequence.append([20, 21])
    drawn = sequence.sample_input()
    assert drawn.output_index == 2
    assert drawn.params.seed == 9
    assert (list(drawn.prompt_token_ids), drawn.output_token_ids) == ([10, 11, 12], [20, 21])
