"""Penalties, biases, withheld tokens and log probabilities on the card against the host's draw."""

from __future__ import annotations

from dataclasses import replace

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from common.errors import InternalError
from common.request import TokenLogprobs
from common.token_rules import TokenRules
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.drawing.draws import Draws
from engine.runner.gpu.drawing import edit_launches
from engine.runner.gpu.drawing.going_on import has_rules
from tests.gpu.edited_rows import (
    MIXED,
    PENALTIES,
    RULES,
    VOCABULARY,
    Pair,
    entry_of,
    logits_for,
    mixed,
    rows_behind,
    way,
)
from tests.gpu_kernels.checked_launch import programs_in
from tests.gpu_kernels.tiny_decoder import SPEC
from tests.support.models.draws import rows_of

MOST_ROWS = 16


def new_pair(garbage: int = 0xFF) -> Pair:
    """Memory has this byte where nobody has written."""
    spec = replace(SPEC, vocab_size=VOCABULARY)
    return Pair(InterpretedDevice(garbage=garbage), InterpretedKernel, spec, MOST_ROWS, 1)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return new_pair()


def of_row(draws: Draws, row: int) -> tuple[int, bool, TokenLogprobs | None]:
    return draws.token_ids[row], draws.is_drawn[row], draws.logprobs.get(row)


@pytest.mark.parametrize("digits", [1, 5], ids=["ties", "no ties"])
def test_draws_are_those_of_the_host(pair: Pair, digits: int) -> None:
    rng = np.random.default_rng(digits)
    rows = rows_behind(mixed(rng))
    draws = pair.require_equal(logits_for(rng, rows, digits=digits), rows)
    assert all(draws.is_drawn)
    asked = [row for row, one in enumerate(MIXED) if one.logprobs is not None]
    assert list(draws.logprobs) == asked


def test_neither_the_order_of_programs_nor_what_memory_held_decides(pair: Pair) -> None:
    rng = np.random.default_rng(4)
    rows = rows_behind(mixed(rng))
    logits = logits_for(rng, rows)
    expected = pair.on_card(logits, rows)
    with programs_in(1):
        found = new_pair(garbage=0x7F).on_card(logits, rows)
    count = len(expected.token_ids)
    assert [of_row(found, row) for row in range(count)] == [
        of_row(expected, row) for row in range(count)
    ]


def test_edited_logits_are_those_of_the_host_to_the_bit(pair: Pair) -> None:
    """Also where they are too small to be drawn; the rows of no edits are as they were."""
    rng = np.random.default_rng(3)
    params = [
        *(way(temperature=0.0, **one) for one in PENALTIES),
        way(temperature=0.0, rules=RULES[1], **PENALTIES[4]),
        way(temperature=0.0, rules=RULES[2], **PENALTIES[3]),
        way(temperature=0.0),
    ]
    entries = [entry_of(rng, one, 50, 40) for one in params]
    rows = rows_behind(entries)
    logits = logits_for(rng, rows, digits=5)
    for row, entry in enumerate(entries):
        assert entry.sample is not None
        # Every bit of a penalty shows where it is taken from 0.
        logits[row, entry.sample.output_token_ids] = 0.0
    pair.on_card(logits, rows)
    decoder = pair.decoder
    raw = decoder.device.download(decoder.memory["logits"], logits.nbytes)
    found = np.frombuffer(raw, np.float32).reshape(logits.shape)
    for row, entry in enumerate(entries):
        expected = edited(logits[row].copy(), entry)
        assert np.array_equal(found[row].view(np.int32), expected.view(np.int32)), row


def edited(row: np.ndarray, entry: ScheduledSequence) -> np.ndarray:
    """A row's logits as the rules of `sampler` change them, token by token."""
    sample = entry.sample
    assert sample is not None
    params, output = sample.params, list(sample.output_token_ids)
    allowed = params.rules.allowed_token_ids
    if allowed:
        row[~np.isin(np.arange(len(row)), allowed)] = -1e30
    for token, bias in params.rules.biases:
        row[token] += np.float32(bias)
    penalty = np.float32(params.repetition_penalty)
    for token in {*sample.prompt_token_ids, *output}:
        if row[token] != np.float32(-1e30):
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in {*output}:
        if row[token] != np.float32(-1e30):
            count = output.count(token)
            less = params.frequency_penalty * count + params.presence_penalty
            row[token] -= np.float32(less)
    for word in params.rules.bad_words:
        row[word[-1]] = -np.inf
    return row


def test_a_row_alone_has_what_it_has_among_others(pair: Pair) -> None:
    """To the last bit, and in another place too."""
    rng = np.random.default_rng(2)
    entries = mixed(rng)
    rows = rows_behind(entries)
    logits = logits_for(rng, rows)
    together = pair.on_card(logits, rows)
    for row in range(0, len(entries), 4):
        own = np.array([row])
        assert of_row(pair.on_card(logits[own], rows_behind([entries[row]])), 0) == of_row(
            together, row
        )
    turned = np.arange(len(entries))[::-2]
    again = pair.on_card(logits[turned], rows_behind([entries[row] for row in turned]))
    for place, row in enumerate(turned.tolist()):
        assert of_row(again, place) == of_row(together, row)


@pytest.mark.parametrize("number", range(2))
def test_drafts_see_the_tokens_before_them(pair: Pair, number: int) -> None:
    """The rows of a sequence's drafts are those of single steps behind the same tokens."""
    rng = np.random.default_rng(20 + number)
    params = [
        way(temperature=0.0, logprobs=3, **PENALTIES[4]),
        way(temperature=1.0, top_k=50, **PENALTIES[3]),
        way(temperature=0.0, frequency_penalty=2.0),
    ]
    drafts = [[70, 70, 2100], [70, 70, 70], [4999, 70, 70]]
    entries = [
        entry_of(rng, one, 20, 5 * number, some) for one, some in zip(params, drafts, strict=True)
    ]
    rows = rows_behind(entries)
    logits = np.repeat(logits_for(rng, rows)[::4], 4, axis=0)
    # Whether a draft before is token 70 decides which of these is drawn.
    logits[:, 1234] = logits.max(axis=1) + 10
    logits[:, 70] = logits[:, 1234] + np.float32(1.5)
    together = pair.require_equal(logits, rows)
    for sequence, entry in enumerate(entries):
        sample = entry.sample
        assert sample is not None
        for count in range(4):
            output = [*sample.output_token_ids, *drafts[sequence][:count]]
            one = replace(sample, output_index=len(output), output_token_ids=output)
            known = [*sample.prompt_token_ids, *output]
            step = ScheduledSequence(0, known[-1:], len(known) - 1, [0], one)
            row = 4 * sequence + count
            alone = pair.on_card(logits[row : row + 1], rows_behind([step]))
            assert of_row(alone, 0) == of_row(together, row), (sequence, count)
    assert together.token_ids[8:11] == [70, 70, 1234]


def test_long_histories_and_many_biases_go_in_rounds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits at a time decides nothing. A history has more tokens than a program reads."""
    rng = np.random.default_rng(5)
    biases = tuple((token, float(rng.uniform(-3, 3))) for token in range(1, 5000, 17))
    params = [
        way(temperature=0.0, logprobs=2, **PENALTIES[4]),
        way(temperature=0.9, rules=TokenRules(biases=biases)),
        way(temperature=0.8, **PENALTIES[0]),
        way(temperature=0.0, rules=TokenRules(biases=biases, bad_words=((1,), (2,), (3,)))),
        way(temperature=0.0, **PENALTIES[3]),
    ]
    entries = [
        entry_of(rng, one, *known)
        for one, known in zip(
            params, [(1500, 1400), (3, 0), (1024, 0), (2, 1), (1500, 1024)], strict=True
        )
    ]
    rows = rows_behind(entries)
    logits = logits_for(rng, rows)
    at_once = pair.require_equal(logits, rows)
    monkeypatch.setattr(edit_launches, "HISTORY_TOKENS", 1)
    monkeypatch.setattr(edit_launches, "LISTED_TOKENS", len(biases))
    small = new_pair()
    assert small.on_card(logits, rows) == at_once


def test_rows_that_filters_leave_are_drawn_from_their_own_logits(pair: Pair) -> None:
    """The host gets them as they were before biases, penalties and withheld tokens."""
    rng = np.random.default_rng(6)
    params = [
        way(temperature=1.0, top_p=0.98, min_tokens=9000, **PENALTIES[4]),
        way(temperature=1.0, top_p=1 - 1e-13, rules=RULES[1]),
        way(temperature=0.0, rules=RULES[0]),
        way(temperature=1.0, top_p=0.98, rules=RULES[2]),
    ]
    rows = rows_behind([entry_of(rng, one, 30, 30) for one in params])
    draws = pair.require_equal(logits_for(rng, rows, scale=0.2, digits=5), rows)
    assert all(draws.is_drawn)


def test_logits_are_computed_again_only_where_they_are_read_afterwards(pair: Pair) -> None:
    """For log probabilities after edits, and for rows that the host draws."""
    rng = np.random.default_rng(7)
    for params, count in (
        ([way(temperature=0.0, **PENALTIES[0]), way(logprobs=2)], 1),
        ([way(temperature=0.0, logprobs=0, **PENALTIES[0])], 2),
        ([way(top_p=1 - 1e-13, **PENALTIES[0])], 2),
        ([way(top_p=1 - 1e-13), way(temperature=0.0, **PENALTIES[0])], 2),
    ):
        rows = rows_behind([entry_of(rng, one, 30, 30) for one in params])
        pair.require_equal(logits_for(rng, rows), rows)
        pair.on_card(logits_for(rng, rows), rows)
        assert pair.decoder.num_queued == count, params


def test_rows_without_a_token_have_none(pair: Pair) -> None:
    """Logits that are not finite, before penalties or by them; and every allowed token withheld."""
    rng = np.random.default_rng(8)
    word = TokenRules(allowed_token_ids=(5, 6), bad_words=((8, 6), (5,)))
    first = TokenRules(allowed_token_ids=(0,), bad_words=((8, 0),))
    params = [
        way(temperature=0.0, logprobs=3, **PENALTIES[1]),
        way(temperature=1.0, **PENALTIES[1]),
        way(temperature=1.0, top_k=9, **PENALTIES[0]),
        way(temperature=1.0, logprobs=3, rules=RULES[0]),
        way(temperature=0.0, rules=word, logprobs=1),
        way(temperature=1.0, rules=word, presence_penalty=1.0),
        way(temperature=1.0, rules=first),
        way(temperature=0.0, logprobs=3, **PENALTIES[1]),
    ]
    entries = [entry_of(rng, one, 30, 30) for one in params]
    entries[4:7] = [
        replace(
            one, token_ids=[8],
            sample=replace(one.sample, output_token_ids=[*one.sample.output_token_ids[:-1], 8]),
        )
        for one in entries[4:7] if one.sample is not None
    ]  # fmt: skip
    rows = rows_behind(entries)
    logits = logits_for(rng, rows)
    first_known = rows.token_ids[rows.histories, 0]
    logits[0, first_known[0]] = 3e38
    logits[1, 4999] = np.nan
    logits[2, first_known[2]] = -3e38
    logits[3, 7] = np.inf
    draws = pair.require_equal(logits, rows)
    assert draws.is_drawn == [False] * 7 + [True]


def test_likeliest_tokens_of_equal_logits_are_those_of_the_lowest_ids(pair: Pair) -> None:
    rng = np.random.default_rng(9)
    rows = rows_of([SampleInput(way(logprobs=20, temperature=0.0), 0, [1], [])] * 3, VOCABULARY)
    logits = np.full((3, VOCABULARY), -2.0, np.float32)
    for row, count in enumerate((3, 20, 45)):
        logits[row, rng.permutation(VOCABULARY)[:count]] = (0.0, -0.0, 1.0)[row]
    draws = pair.require_equal(logits, rows)
    top = [token for token, _ in draws.logprobs[2].top]
    assert top == np.flatnonzero(logits[2] == 1.0)[:20].tolist()


def test_only_rows_of_a_temperature_alone_are_drawn_by_the_graph() -> None:
    """The step behind is queued after the draws of the others: it overwrites their logits."""
    params = [
        way(temperature=0.0), way(), way(logprobs=0), way(presence_penalty=0.1),
        way(repetition_penalty=1.1), way(rules=RULES[0]), way(min_tokens=20),
    ]  # fmt: skip
    batch = batch_of([entry_of(np.random.default_rng(1), one, 5, 5) for one in params])
    seats = batch.seats
    indices = seats.num_known - seats.num_prompt
    needs_more = has_rules(seats.sampling, indices, seats, batch.rows)
    assert needs_more.tolist() == [False] * 2 + [True] * 5


def test_tokens_outside_the_vocabulary_are_a_bug(pair: Pair) -> None:
    one = SampleInput(way(**PENALTIES[0]), 1, [5], [VOCABULARY])
    with pytest.raises(InternalError, match="wanted 0 to 4999"):
        pair.on_card(np.zeros((1, VOCABULARY), np.float32), rows_of([one], VOCABULARY))
