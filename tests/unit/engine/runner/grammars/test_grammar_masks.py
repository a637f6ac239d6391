"""Masks of grammars: of drafts' rows too, whatever a seat held before; a failure is one row's."""

from __future__ import annotations

import gc
import itertools
import json
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from common.errors import InternalError, InvalidRequest, PdserveError
from common.grammar import Grammar, GrammarKind
from common.request import SamplingParams
from engine.core.runner_contract import DrawnTokens
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.grammars import held_matcher
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.grammars.masks import MAX_FORCED, GrammarMasks
from engine.runner.grammars.unmasked_rows import GrammarJob
from grammars import kept
from grammars.compiler import GrammarCompiler
from tests.support.engine import hash_grammars
from tests.support.engine.hash_grammars import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    allowed_after,
    id_of,
    token_ids,
    whole_token,
)
from tests.support.engine.tool_grammars import GRAMMARS, MAY_CALL, MUST_CALL, THINKS
from tests.support.models.tiny_model import EOS_TOKEN_ID as TINY_EOS_TOKEN_ID
from tests.support.models.tiny_model import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.support.models.tiny_model import byte_tokens, make_tiny_model
from tests.unit.engine.runner.grammars.mask_rows import answers, entry, masks_of


def allowed(masks: GrammarMasks, batch: StepBatch) -> list[np.ndarray | None]:
    """What each row may draw, None without a grammar."""
    pending = masks.begin(batch)
    assert pending is not None
    return hash_grammars.allowed_in(pending)


@pytest.mark.covers("G02")
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_each_row_has_the_mask_after_the_drafts_before_it(grammar: Grammar) -> None:
    masks = masks_of()
    tokens = answers(grammar, 1)
    for num_known in range(len(tokens)):
        output, drafts = tokens[:num_known], tokens[num_known : num_known + 3]
        rows = allowed(masks, batch_of([entry(None, [5], [6]), entry(grammar, output, drafts)]))
        assert rows[:2] == [None, None]
        for count, row in enumerate(rows[2:]):
            assert row is not None
            assert (row == allowed_after(grammar, output + drafts[:count])).all()


ACROSS = [
    (THINKS, [id_of("ab"), whole_token("b</think>"), *token_ids('{"name": "')], id_of("cd")),
    (THINKS, [id_of("ab"), whole_token("</think>{"), *token_ids('"name": "')], id_of("cd")),
    (MAY_CALL, [id_of("ab"), whole_token("b<tool_call>"), *token_ids('\n{"name": "')], id_of("cd")),
    (MUST_CALL, [whole_token("<tool_call>"), *token_ids('\n{"name": "name", "argu')], None),
]
"""Answers that pass from free text, or a tag, to JSON; and a token that may stand there instead."""


@pytest.mark.covers("G07", "G08")
@pytest.mark.parametrize(("grammar", "tokens", "other"), ACROSS)
def test_drafts_across_the_end_of_free_text_and_back(
    grammar: Grammar, tokens: list[int], other: int | None
) -> None:
    """A lexeme that ends lazily ends in the middle of drafts, of which none or some are kept."""
    masks = masks_of()
    for num_known in range(len(tokens)):
        output, drafts = tokens[:num_known], tokens[num_known:]
        rows = allowed(masks, batch_of([entry(grammar, output, drafts)]))
        for count, row in enumerate(rows):
            assert row is not None
            assert (row == allowed_after(grammar, output + drafts[:count])).all()
        # The model draws something else in place of a draft, or the sequence is computed again.
        for changed in ([*output, other] if other is not None and num_known < 2 else output, []):
            (row,) = allowed(masks, batch_of([entry(grammar, changed)]))
            assert row is not None
            assert (row == allowed_after(grammar, changed)).all()


@pytest.mark.covers("G08")
@pytest.mark.parametrize(("grammar", "tokens", "_other"), ACROSS)
def test_a_draft_that_is_free_text_is_refused_behind_its_end(
    grammar: Grammar, tokens: list[int], _other: int | None
) -> None:
    """Drafts that a model makes from free text go on as free text behind the tag."""
    masks, texts = masks_of(), [hash_grammars.text_of([one]) for one in tokens]
    tag = next(number for number, text in enumerate(texts) if ">" in text)
    output, free = tokens[:tag], [tokens[tag], *[id_of("ab")] * 3]
    rows = allowed(masks, batch_of([entry(grammar, output, free)]))
    assert rows[1] is not None
    assert not rows[1][id_of("ab")]
    assert (rows[1] == allowed_after(grammar, [*output, tokens[tag]])).all()
    (row,) = allowed(masks, batch_of([entry(grammar, tokens[: tag + 1])]))
    assert row is not None
    assert (row == rows[1]).all()


def visits() -> Iterator[tuple[Grammar, list[int]]]:
    """A seat's occupants: other answers under the same grammar, earlier and later tokens."""
    for grammar, seed, end in itertools.product(GRAMMARS[:2], (1, 2), (7, 2, 9, 0, 5)):
        yield grammar, answers(grammar, seed)[:end]


@pytest.mark.covers("G04")
def test_a_matcher_is_a_cache_of_what_was_output() -> None:
    masks = masks_of()
    for grammar, output in visits():
        (row,) = allowed(masks, batch_of([entry(grammar, output)]))
        assert row is not None
        assert (row == allowed_after(grammar, output)).all()


@pytest.mark.covers("G04")
def test_a_token_that_a_grammar_names_by_its_id_is_taken_back() -> None:
    """llguidance does not return to the states before it: the next answer followed no grammar."""
    named, *others = token_ids("name")
    grammar = Grammar(GrammarKind.LARK, f'start: "x" <[{named}]> /[a-z]+/')
    output = [*token_ids("x"), named, *others]
    masks = masks_of()
    for end in (len(output), 0, 3, 1, 2, 0):
        (row,) = allowed(masks, batch_of([entry(grammar, output[:end])]))
        assert row is not None
        assert (row == allowed_after(grammar, output[:end])).all(), end
    results: list[DrawnTokens | None] = [DrawnTokens((output[0],))]
    drafts = batch_of([entry(grammar, [], output)])
    allowed(masks, drafts)
    masks.propose(drafts, results)
    (row,) = allowed(masks, batch_of([entry(grammar, output[:1])]))
    assert row is not None
    assert (row == allowed_after(grammar, output[:1])).all()


@pytest.mark.covers("G02")
@pytest.mark.parametrize("wrong", [EOS_TOKEN_ID, 200])
def test_an_illegal_draft_is_not_consumed(wrong: int) -> None:
    masks, grammar = masks_of(), GRAMMARS[0]
    output = answers(grammar, 1)[:4]
    first, *_ = allowed(masks, batch_of([entry(grammar, output, [wrong, wrong])]))
    assert first is not None
    assert not first[wrong]
    assert (first == allowed_after(grammar, output)).all()
    (again,) = allowed(masks, batch_of([entry(grammar, output)]))
    assert again is not None
    assert (again == allowed_after(grammar, output)).all()


@pytest.mark.covers("G06")
def test_drafts_accepted_behind_the_end_leave_no_broken_matcher() -> None:
    """They are equal to what was drawn there, and are no part of the output."""
    masks, grammar = masks_of(), Grammar(GrammarKind.LARK, 'start: "name"')
    output = hash_grammars.token_ids("name")
    batch = batch_of([entry(grammar, [], [*output, EOS_TOKEN_ID, 7])])
    allowed(masks, batch)
    results: list[DrawnTokens | None] = [DrawnTokens((*output, EOS_TOKEN_ID, 7, 9))]
    masks.propose(batch, results)
    assert results[0] is not None
    assert results[0].forced_token_ids == ()
    (row,) = allowed(masks, batch_of([entry(grammar, [])]))
    assert row is not None
    assert np.flatnonzero(row).tolist() == output


def test_before_its_least_length_an_answer_ends_only_where_nothing_else_can_follow() -> None:
    masks, grammar = masks_of(), Grammar(GrammarKind.REGEX, "(ab){1,2}")
    pair = hash_grammars.token_ids("ab")
    free = [entry(grammar, pair), entry(grammar, pair * 2)]
    held = [entry(grammar, pair, min_tokens=9), entry(grammar, pair * 2, min_tokens=9)]
    ends = [row is not None and bool(row[EOS_TOKEN_ID]) for row in allowed(masks, batch_of(free))]
    assert ends == [True, True]
    rows = allowed(masks, batch_of(held))
    ends = [row is not None and bool(row[EOS_TOKEN_ID]) for row in rows]
    assert ends == [False, True]
    assert all(row is not None and row.any() for row in rows)


def test_what_must_follow_is_proposed() -> None:
    masks = masks_of()
    batch = batch_of([entry(GRAMMARS[0], [])])
    allowed(masks, batch)
    first = hash_grammars.token_ids('{"')
    results: list[DrawnTokens | None] = [DrawnTokens(tuple(first))]
    masks.propose(batch, results)
    assert results[0] is not None
    forced = list(results[0].forced_token_ids)
    assert hash_grammars.text_of(first + forced).startswith('{"name')
    assert len(forced) <= MAX_FORCED
    for count, token_id in enumerate(forced):
        alone = np.flatnonzero(allowed_after(GRAMMARS[0], first + forced[:count]))
        assert alone.tolist() == [token_id]


def test_without_drafts_nothing_is_proposed() -> None:
    masks = masks_of(proposes=False)
    batch = batch_of([entry(GRAMMARS[0], [])])
    allowed(masks, batch)
    results: list[DrawnTokens | None] = [DrawnTokens(tuple(hash_grammars.token_ids('{"')))]
    masks.propose(batch, results)
    assert results[0] is not None
    assert results[0].forced_token_ids == ()


@pytest.mark.covers("G09")
def test_a_grammar_that_fails_allows_nothing_and_leaves_the_others() -> None:
    good, refused = GRAMMARS[0], Grammar(GrammarKind.REGEX, "x")

    class Matchers(hash_grammars.CompilesOnDemand):
        def matcher(self, grammar: Grammar) -> LLMatcher:
            if grammar == refused:
                raise InvalidRequest("too large")
            return hash_grammars.compiler().matcher(grammar)

    matchers = Matchers(hash_grammars.compiler().tokenizer, [])
    masks = GrammarMasks(matchers, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=True)
    illegal = [200, 201]
    batch = batch_of([entry(refused, []), entry(good, []), entry(good, illegal)])
    pending = masks.begin(batch)
    assert pending is not None
    first, second, third = (mask for mask in hash_grammars.allowed_in(pending) if mask is not None)
    seats = batch.rows.tolist()
    assert set(pending.failures) == {seats[0], seats[2]}
    assert str(pending.failures[seats[0]]) == "too large"
    told = (
        "a grammar cannot be followed behind 2 tokens: token 200 was drawn and is refused: Parser"
    )
    assert str(pending.failures[seats[2]]).startswith(told)
    assert isinstance(pending.failures[seats[2]], InternalError)
    assert isinstance(pending.failures[seats[0]], InvalidRequest)
    assert masks.statistics().failures == {"compile": 1, "follow": 1}
    assert not first.any()
    assert (second == allowed_after(good, [])).all()
    assert not third.any(), "tokens that break the grammar came from elsewhere"


def test_what_is_counted() -> None:
    """Only the drafts that the grammar forces, and those that became output."""
    matchers = hash_grammars.CompilesOnDemand(hash_grammars.tokenizer())
    masks = GrammarMasks(matchers, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=True)
    grammar = Grammar(GrammarKind.LARK, 'start: "name" ("true" | "null") "name" "name" "value"')
    output: list[int] = []

    def step(drafts: list[int], drawn: list[int]) -> tuple[int, ...]:
        batch = batch_of([entry(grammar, output, drafts)])
        pending = masks.begin(batch)
        assert pending is not None
        pending.wait()
        result = DrawnTokens(tuple(drawn))
        masks.propose(batch, [result])
        output.extend(drawn)
        return result.forced_token_ids

    name, true, value = (hash_grammars.id_of(text) for text in ("name", "true", "value"))
    assert step([], [name]) == ()
    assert step([true], [true]) == (name, name, value)  # the draft was no forced one
    assert step([name, name, true], [name, name, value])[:1] == (EOS_TOKEN_ID,)
    counted = masks.statistics()
    assert (counted.num_forced_drafted, counted.num_forced_accepted) == (2, 2)
    assert counted.num_masks == 2 + 4, "a row without drafts is drawn without a mask"
    assert counted.lookups == {"cached": 0, "compiled": 1, "refused": 0}
    assert counted.num_cached == 1
    assert counted.masks_s > 0


def test_a_forced_draft_that_the_model_does_not_draw() -> None:
    masks = masks_of()
    grammar = Grammar(GrammarKind.LARK, 'start: "name" "true"')
    name, true = hash_grammars.id_of("name"), hash_grammars.id_of("true")
    batch = batch_of([entry(grammar, [])])
    masks.begin(batch).wait()  # type: ignore[union-attr]
    masks.propose(batch, [DrawnTokens((name,))])
    batch = batch_of([entry(grammar, [name], [true])])
    masks.begin(batch).wait()  # type: ignore[union-attr]
    masks.propose(batch, [DrawnTokens((ord("t"),))])
    counted = masks.statistics()
    assert (counted.num_forced_drafted, counted.num_forced_accepted) == (1, 0)


def test_masks_of_some_rows() -> None:
    whole = AllowedTokens(np.array([-1, 0, 1]), np.zeros((2, 4), np.int32))
    part = whole.take(np.array([2, 0]))
    assert part.mask_rows.tolist() == [1, -1]
    assert part.masks is whole.masks


def test_no_step_compiles() -> None:
    """A step has what its requests hold; without it the request fails, and nobody waits."""
    compiler = GrammarCompiler(hash_grammars.tokenizer())
    masks = GrammarMasks(compiler, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=True)
    asked = replace(GRAMMARS[0])
    pending = masks.begin(batch_of([entry(asked, [], top_k=5)]))
    assert pending is not None
    pending.wait()
    (failure,) = pending.failures.values()
    assert "is not compiled when it is needed" in str(failure)
    assert compiler.lookups() == {"cached": 0, "compiled": 0, "refused": 0}
    waiting = masks.prepare(asked)
    assert waiting is not None
    waiting.result(20)
    assert allowed(masks, batch_of([entry(asked, [])]))[0] is not None
    assert compiler.lookups()["compiled"] == 1


def test_a_grammar_that_is_used_up_is_compiled_for_the_next_request_alone() -> None:
    """Those that follow it now go on; the one that fails ends, and its step waits for nothing."""

    class UsedUp(GrammarCompiler):
        def kept(self, grammar: Grammar) -> LLMatcher:
            if is_used_up:
                raise InternalError("too many states: 50000 >= 50000")
            return super().kept(grammar)

    is_used_up = False
    compiler = UsedUp(hash_grammars.tokenizer())
    masks = GrammarMasks(compiler, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=True)
    asked, later = replace(GRAMMARS[0]), replace(GRAMMARS[0])
    masks.prepare(asked).result(20)  # type: ignore[union-attr]
    is_used_up = True
    pending = masks.begin(batch_of([entry(asked, [], top_k=5)]))
    assert pending is not None
    pending.wait()
    (failure,) = pending.failures.values()
    assert isinstance(failure, InvalidRequest)
    is_used_up = False
    assert compiler.lookups()["compiled"] == 1
    assert compiler.kept(asked), "who holds it keeps it"
    waiting = masks.prepare(later)
    assert waiting is not None, "it is compiled anew"
    waiting.result(20)
    assert compiler.lookups()["compiled"] == 2


def test_a_grammar_that_becomes_too_large_is_the_requests_error() -> None:
    """Where no text has come yet, nothing shows how much its parser will have to look at."""
    parts = [
        {"type": "object", "properties": {f"{letter}{i}": {} for i in range(900)}}
        for letter in "ab"
    ]
    inner = {"type": "object", "properties": {"c": {"allOf": parts}, "d": {"type": "null"}}}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(inner), "guided_json")
    masks = masks_of()
    fine = allowed(masks, batch_of([entry(grammar, token_ids('{"d": '), top_k=5)]))
    assert fine[0] is not None
    batch = batch_of([entry(grammar, token_ids('{"c": {"'), top_k=5), entry(GRAMMARS[0], [])])
    pending = masks.begin(batch)
    assert pending is not None
    pending.wait()
    (failure,) = pending.failures.values()
    assert isinstance(failure, InvalidRequest)
    assert "too large to be followed behind" in str(failure)


def test_a_grammar_that_grows_beyond_the_bound_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each token finds more states than are left room for; beside it another one goes on."""
    monkeypatch.setattr(held_matcher, "COSTLY_S", 0.0)
    compiler = GrammarCompiler(hash_grammars.tokenizer(), weigh=lambda grammar: 1000)
    masks = GrammarMasks(compiler, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=True)
    growing, good = Grammar(GrammarKind.REGEX, "(.*a.{300})*"), replace(GRAMMARS[0])
    for grammar in (growing, good):
        masks.prepare(grammar).result(20)  # type: ignore[union-attr]
    monkeypatch.setattr(kept, "MAX_KEPT_BYTES", 500_000)
    monkeypatch.setattr(kept, "USUAL_GROWTH_BYTES", 400_000)
    monkeypatch.setattr(kept, "MAX_GROWTH_BYTES", 1 << 40)
    letters, output = random.Random(1), list[int]()
    failures: dict[int, PdserveError] = {}
    while not failures and len(output) < 400:
        batch = batch_of([entry(growing, output, top_k=5), entry(good, [], top_k=5)])
        pending = masks.begin(batch)
        assert pending is not None
        pending.wait()
        failures = dict(pending.failures)
        output.append(id_of(letters.choice("abc")))
    ((seat, failure),) = failures.items()
    assert seat == int(batch.rows[0])
    assert isinstance(failure, InvalidRequest)
    assert "this one grows" in str(failure)
    assert len(output) > 3


def test_a_seat_that_is_left_holds_no_grammar() -> None:
    compiler = GrammarCompiler(hash_grammars.tokenizer())
    masks = GrammarMasks(compiler, VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=True)
    asked = replace(GRAMMARS[0])
    masks.prepare(asked).result(20)  # type: ignore[union-attr]
    batch = batch_of([entry(asked, [])])
    allowed(masks, batch)
    held = weakref.ref(asked)
    batch.seats.params[int(batch.rows[0])] = None
    batch.seats.has_grammar[batch.rows] = False
    assert masks.begin(batch) is None
    del asked, batch
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    ("kind", "text", "output"),
    [
        (
            GrammarKind.JSON_SCHEMA,
            '{"properties": {"c": {"type": "integer"}, "é": {}}, "required": ["c", "é"]}',
            '{"c": 1, ""',
        ),
        (GrammarKind.REGEX, "a|bé", "b"),
        (GrammarKind.REGEX, "x|[ab]é", "a"),
        (GrammarKind.LARK, 'start: "x" | b\nb: /[ab]/ "é"', "a"),
    ],
)
def test_a_text_that_no_token_writes_is_the_requests_fault(
    tmp_path: Path, kind: GrammarKind, text: str, output: str
) -> None:
    """It was an internal error: status 500 for a mistake of the client."""
    folder = make_tiny_model(tmp_path / "tiny")
    matchers = GrammarCompiler.load(folder, TINY_VOCAB_SIZE, [TINY_EOS_TOKEN_ID])
    assert matchers is not None
    assert not matchers.writes_every_byte
    assert hash_grammars.compiler().writes_every_byte
    grammar = Grammar(kind, text)
    matchers.matcher(grammar)
    assert matchers.hold(grammar)
    masks = GrammarMasks(matchers, TINY_VOCAB_SIZE, frozenset({TINY_EOS_TOKEN_ID}), proposes=True)
    pending = masks.begin(batch_of([entry(grammar, byte_tokens(output))]))
    assert pending is not None
    hash_grammars.allowed_in(pending)
    (failure,) = pending.failures.values()
    assert isinstance(failure, InvalidRequest)
    assert "a text that the tokens of this model do not write" in str(failure)


TEXT_END = byte_tokens("x")[0]
"""Ends the answers of a model whose end token has a text, as a line feed."""


def masks_with_a_text_that_ends(folder: Path, grammar: Grammar) -> GrammarMasks:
    """The masks of a model that has two end tokens, one of them an ordinary text."""
    ends = frozenset({TINY_EOS_TOKEN_ID, TEXT_END})
    matchers = GrammarCompiler.load(make_tiny_model(folder), TINY_VOCAB_SIZE, ends)
    assert matchers is not None
    matchers.matcher(grammar)
    assert matchers.hold(grammar)
    return GrammarMasks(matchers, TINY_VOCAB_SIZE, ends, proposes=True)


@pytest.mark.covers("G19")
@pytest.mark.parametrize("asked", [{}, {"logprobs": 0}, {"temperature": 0.0}])
def test_a_text_that_ends_answers_is_allowed_where_an_answer_may_end(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    """Within a text it would end the answer in its middle."""
    grammar = Grammar(GrammarKind.REGEX, "[a-z]{3,5}")
    masks = masks_with_a_text_that_ends(tmp_path / "tiny", grammar)
    word, (other,) = byte_tokens("abcde"), byte_tokens("y")
    for num_known in range(len(word) + 1):
        output, drafts = word[:num_known], word[num_known:]
        rows = allowed(masks, batch_of([entry(grammar, output, drafts, **asked)]))
        for length, row in enumerate(rows, num_known):
            assert row is not None
            assert (row[TEXT_END], row[TINY_EOS_TOKEN_ID]) == (length >= 3, length >= 3)
            assert row[other] == (length < len(word))


@pytest.mark.covers("G19")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_ends_answers_is_not_drawn_within_one(
    tmp_path: Path, temperature: float
) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[a-z]{3,5}")
    masks = masks_with_a_text_that_ends(tmp_path / "tiny", grammar)
    logits = np.zeros(TINY_VOCAB_SIZE, np.float32)
    logits[TEXT_END] = 1.0
    params = SamplingParams(max_tokens=100, temperature=temperature, grammar=grammar)
    for length in range(5):
        job = GrammarJob(0, 0, params, byte_tokens("abcde")[:length], [])
        wanted = TEXT_END if length >= 3 else None
        assert masks.checked(job, TEXT_END, logits) == wanted


@pytest.mark.covers("G19")
@pytest.mark.parametrize("asked", [{}, {"logprobs": 0}, {"temperature": 0.0}])
def test_a_grammar_that_wants_a_text_that_ends_answers_is_the_requests_fault(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    grammar = Grammar(GrammarKind.REGEX, "ax[bc]")
    masks = masks_with_a_text_that_ends(tmp_path / "tiny", grammar)
    pending = masks.begin(batch_of([entry(grammar, byte_tokens("a"), **asked)]))
    assert pending is not None
    hash_grammars.allowed_in(pending)
    (failure,) = pending.failures.values()
    assert isinstance(failure, InvalidRequest)
    assert "a text that ends the answers of this model" in str(failure)
    params = SamplingParams(max_tokens=100, temperature=0.0, grammar=grammar)
    job = GrammarJob(0, 0, params, byte_tokens("a"), [])
    assert masks.checked(job, TEXT_END, np.zeros(TINY_VOCAB_SIZE, np.float32)) is None
