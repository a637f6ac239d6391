"""Penalties, biases, withheld tokens and log probabilities on the card against the host's draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice, InterpretedKernel  # isort: skip

import numpy as np
import pytest

from common.errors import InternalError
from common.request import SamplingParams, TokenLogprobs
from common.token_rules import TokenRules
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import EMPTY_BATCH, batch_of
from engine.runner.drawing.host_draw import HostDraw
from engine.runner.drawing.sampler import SampledRows, sampled_rows
from engine.runner.drawing.verification import Draws
from engine.runner.gpu.drawing import edit_launches
from engine.runner.gpu.drawing.card_draw import CardDraw, has_rules
from engine.runner.gpu.launches import AttentionShape, KVPool, Launches
from engine.runner.gpu.steps.decode_step import draw_sizes
from engine.runner.gpu.steps.step_memory import StepMemory
from tests.gpu_kernels.tiny_decoder import SPEC
from tests.support.models.draws import rows_of

VOCABULARY = 5000
"""Three slices, the last one not a whole one."""
MOST_ROWS = 16
MAX_LEN = 3000
HIDDEN = SimpleNamespace(drawing=None, rows=SimpleNamespace(places=None))


class GivenLogits:
    """A decoder whose logits are given; it counts how often it computed them for the card."""

    spec = replace(SPEC, vocab_size=VOCABULARY)
    max_len = MAX_LEN
    most_logits_rows = MOST_ROWS
    stream = 1

    def __init__(self) -> None:
        device: Any = InterpretedDevice()
        nothing: Any = None
        self.device = device
        self.launches = Launches(
            InterpretedKernel, device.properties, self.spec, nothing, KVPool(0, 1, 16, 1),
            AttentionShape(),
        )  # fmt: skip
        sizes = draw_sizes(self.launches.num_slices, MOST_ROWS)
        self.memory = StepMemory(device, {"logits": 4 * MOST_ROWS * VOCABULARY, **sizes})
        self.given = np.zeros((0, VOCABULARY), np.float32)
        self.num_queued = 0

    def queue_logits(self, hidden: Any, rows: np.ndarray) -> None:
        self.num_queued += 1
        self.device.upload_array(self.memory["logits"], np.ascontiguousarray(self.given[rows]))

    def logits(self, hidden: Any, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.given[rows]
        return found


class Pair:
    """The card's draw and the host's, of the same logits."""

    def __init__(self) -> None:
        decoder: Any = GivenLogits()
        self.decoder, self.card = decoder, CardDraw(decoder.device, decoder)
        self._host = HostDraw(decoder, VOCABULARY)

    def on_card(self, logits: np.ndarray, rows: SampledRows) -> Draws:
        self.decoder.given, self.decoder.num_queued = logits, 0
        return self.card.draw(HIDDEN, np.arange(len(rows)), rows, EMPTY_BATCH)  # type: ignore[arg-type]

    def on_host(self, logits: np.ndarray, rows: SampledRows) -> Draws:
        self.decoder.given = logits
        return self._host.draw(HIDDEN, np.arange(len(rows)), rows, EMPTY_BATCH)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def way(**given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=9000, **given)


SOME = tuple(range(0, VOCABULARY, 3))
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"presence_penalty": 1.5, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.1, "presence_penalty": -0.7, "frequency_penalty": 1.9},
]
RULES = [
    TokenRules(biases=((3, 40.0), (4999, 41.0), (2047, -100.0))),
    # Float32 sums of a token's biases, in their order.
    TokenRules(biases=((9, 30.3), (2048, 0.7), (9, 0.1), (9, 0.07), (2048, 36.6))),
    TokenRules(allowed_token_ids=SOME, bad_words=((3,), (0,)), biases=((6, 2.5), (7, 100.0))),
]
MIXED = [
    *(way(temperature=0.0, **one) for one in PENALTIES),
    *(way(temperature=0.8, **one) for one in PENALTIES),
    *(way(temperature=1.2, top_k=40, top_p=0.9, **one) for one in PENALTIES),
    *(way(temperature=0.9, rules=one) for one in RULES),
    *(way(temperature=0.0, rules=one, logprobs=4) for one in RULES),
    *(way(top_p=0.8, rules=one, repetition_penalty=1.4, logprobs=20) for one in RULES),
    way(temperature=0.0, logprobs=0),
    way(temperature=1.0, logprobs=7, min_tokens=9000, stop_token_ids=(11, 2050)),
    way(temperature=1.0, min_p=0.1, logprobs=20, frequency_penalty=1.0),
    way(temperature=0.0),
    way(temperature=0.7, top_k=5),
]


def entry_of(
    rng: np.random.Generator, params: SamplingParams, num_prompt: int, num_output: int,
    drafts: Sequence[int] = (),
) -> ScheduledSequence:  # fmt: skip
    """A decoding sequence behind random tokens, of which many are there several times."""
    tokens = rng.integers(0, VOCABULARY, num_prompt + num_output)
    few = rng.integers(0, VOCABULARY, 5)
    is_one = rng.random(len(tokens)) < 0.6
    tokens[is_one] = few[rng.integers(0, 5, int(is_one.sum()))]
    prompt, output = tokens[:num_prompt].tolist(), tokens[num_prompt:].tolist()
    sample = SampleInput(replace(params, seed=int(rng.integers(2**63))), num_output, prompt, output)
    last = (prompt + output)[-1]
    return ScheduledSequence(
        0, [last, *drafts], len(tokens) - 1, [0], sample, num_drafts=len(drafts)
    )


def rows_behind(entries: Sequence[ScheduledSequence]) -> SampledRows:
    return sampled_rows(batch_of(entries), VOCABULARY, {17})


def mixed(rng: np.random.Generator) -> list[ScheduledSequence]:
    return [entry_of(rng, one, int(rng.integers(1, 60)), int(rng.integers(0, 40))) for one in MIXED]


def logits_for(
    rng: np.random.Generator, rows: SampledRows, scale: float = 4.0, digits: int = 1
) -> np.ndarray:
    """Logits with ties, in which penalised tokens are likely and unlikely ones."""
    logits = np.round(rng.standard_normal((len(rows), VOCABULARY)) * scale, digits)
    for row in range(len(rows)):
        known = rows.token_ids[rows.histories[row], : rows.num_tokens[row]]
        logits[row, known] += rng.choice([0.0, 3 * scale], len(known))
    return logits.astype(np.float32)


def require_hosts(pair: Pair, logits: np.ndarray, rows: SampledRows) -> Draws:
    """Check what the card drew against what the host draws; return it."""
    found, expected = pair.on_card(logits, rows), pair.on_host(logits, rows)
    assert found.token_ids == expected.token_ids
    assert found.is_drawn == expected.is_drawn
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, one in found.logprobs.items():
        require_close(one, expected.logprobs[row])
    return found


def require_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    """The same tokens in the same order; values differ by the order of float64 sums."""
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]
    values = [found.logprob, *(value for _, value in found.top)]
    wanted = [expected.logprob, *(value for _, value in expected.top)]
    np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-12)


def of_row(draws: Draws, row: int) -> tuple[int, bool, TokenLogprobs | None]:
    return draws.token_ids[row], draws.is_drawn[row], draws.logprobs.get(row)


@pytest.mark.parametrize("digits", [1, 5], ids=["ties", "no ties"])
def test_draws_are_those_of_the_host(pair: Pair, digits: int) -> None:
    rng = np.random.default_rng(digits)
    rows = rows_behind(mixed(rng))
    draws = require_hosts(pair, logits_for(rng, rows, digits=digits), rows)
    assert all(draws.is_drawn)
    asked = [row for row, one in enumerate(MIXED) if one.logprobs is not None]
    assert list(draws.logprobs) == asked


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
    together = require_hosts(pair, logits, rows)
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
    at_once = require_hosts(pair, logits, rows)
    monkeypatch.setattr(edit_launches, "HISTORY_TOKENS", 1)
    monkeypatch.setattr(edit_launches, "LISTED_TOKENS", len(biases))
    small = Pair()
    assert small.on_card(logits, rows) == at_once


def test_rows_that_filters_leave_are_drawn_from_their_own_logits(pair: Pair) -> None:
    """The host gets them as they were before biases, penalties and withheld tokens."""
    rng = np.random.default_rng(6)
    params = [
        way(temperature=1.0, top_p=0.98, min_tokens=9000, **PENALTIES[4]),
        way(temperature=1.0, top_p=1 - 1e-13, rules=RULES[1], logprobs=5),
        way(temperature=0.0, rules=RULES[0]),
        way(temperature=1.0, top_p=0.98, rules=RULES[2]),
    ]
    rows = rows_behind([entry_of(rng, one, 30, 30) for one in params])
    draws = require_hosts(pair, logits_for(rng, rows, scale=0.2, digits=5), rows)
    assert all(draws.is_drawn)


def test_logits_are_computed_again_only_where_they_are_read_after_edits(pair: Pair) -> None:
    rng = np.random.default_rng(7)
    for params, count in (
        ([way(temperature=0.0, **PENALTIES[0]), way(logprobs=2)], 1),
        ([way(temperature=0.0, logprobs=0, **PENALTIES[0])], 2),
        ([way(top_p=1 - 1e-13, **PENALTIES[0])], 2),
        ([way(top_p=1 - 1e-13), way(temperature=0.0, **PENALTIES[0])], 1),
    ):
        rows = rows_behind([entry_of(rng, one, 30, 30) for one in params])
        require_hosts(pair, logits_for(rng, rows), rows)
        pair.on_card(logits_for(rng, rows), rows)
        assert pair.decoder.num_queued == count, params


def test_rows_without_a_token_have_none(pair: Pair) -> None:
    """Logits that are not finite, before penalties or by them; and every allowed token withheld."""
    rng = np.random.default_rng(8)
    word = TokenRules(allowed_token_ids=(5, 6), bad_words=((8, 6), (5,)))
    params = [
        way(temperature=0.0, logprobs=3, **PENALTIES[1]),
        way(temperature=1.0, **PENALTIES[1]),
        way(temperature=1.0, top_k=9, **PENALTIES[0]),
        way(temperature=1.0, logprobs=3, rules=RULES[0]),
        way(temperature=0.0, rules=word, logprobs=1),
        way(temperature=1.0, rules=word, presence_penalty=1.0),
        way(temperature=0.0, logprobs=3, **PENALTIES[1]),
    ]
    entries = [entry_of(rng, one, 30, 30) for one in params]
    entries[4:6] = [
        replace(
            one, token_ids=[8],
            sample=replace(one.sample, output_token_ids=[*one.sample.output_token_ids[:-1], 8]),
        )
        for one in entries[4:6] if one.sample is not None
    ]  # fmt: skip
    rows = rows_behind(entries)
    logits = logits_for(rng, rows)
    first_known = rows.token_ids[rows.histories, 0]
    logits[0, first_known[0]] = 3e38
    logits[1, 4999] = np.nan
    logits[2, first_known[2]] = -3e38
    logits[3, 7] = np.inf
    draws = require_hosts(pair, logits, rows)
    assert draws.is_drawn == [False] * 6 + [True]


def test_likeliest_tokens_of_equal_logits_are_those_of_the_lowest_ids(pair: Pair) -> None:
    rng = np.random.default_rng(9)
    rows = rows_of([SampleInput(way(logprobs=20, temperature=0.0), 0, [1], [])] * 3, VOCABULARY)
    logits = np.full((3, VOCABULARY), -2.0, np.float32)
    for row, count in enumerate((3, 20, 45)):
        logits[row, rng.permutation(VOCABULARY)[:count]] = (0.0, -0.0, 1.0)[row]
    draws = require_hosts(pair, logits, rows)
    top = [token for token, _ in draws.logprobs[2].top]
    assert top == np.flatnonzero(logits[2] == 1.0)[:20].tolist()


def test_only_rows_of_a_temperature_alone_let_a_step_go_on() -> None:
    """The others are drawn from logits that the step behind would overwrite."""
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
