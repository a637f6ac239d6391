"""Rows under grammars that are drawn without a mask have the tokens that they have with one."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest
from llguidance import LLMatcher

from common.errors import InvalidRequest
from common.grammar import Grammar, GrammarKind
from common.token_rules import TokenRules
from engine.core.runner_contract import DrawnTokens, ScheduledSequence
from engine.core.step.step_batch import StepBatch, batch_of
from engine.runner.drawing.draws import Draws, add_draws
from engine.runner.drawing.sampler import Sampler, sampled_rows
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.grammars.held_matcher import HeldMatcher
from engine.runner.grammars.masks import GrammarMasks
from tests.support.engine import hash_grammars
from tests.support.engine.hash_grammars import EOS_TOKEN_ID, VOCAB_SIZE, allowed_after
from tests.support.engine.tool_grammars import GRAMMARS
from tests.unit.engine.runner.grammars.mask_rows import answers, entry, masks_of

ENDS = frozenset({EOS_TOKEN_ID})


class Counting(GrammarMasks):
    """Counts draws by what became of them."""

    def __init__(self, *, proposes: bool) -> None:
        super().__init__(hash_grammars.compiler(), VOCAB_SIZE, ENDS, proposes=proposes)
        self.num = {"allowed": 0, "forced": 0, "refused": 0}

    def checked(self, job: Any, token_id: int, logits: np.ndarray) -> int | None:
        found = super().checked(job, token_id, logits)
        kind = "refused" if found is None else "allowed" if found == token_id else "forced"
        self.num[kind] += 1
        return found


def drawn(masks: GrammarMasks, batch: StepBatch, logits: np.ndarray) -> Draws:
    """What a runner draws."""
    pending = masks.begin(batch)
    assert pending is not None
    allowed = pending.wait()
    rows = sampled_rows(batch, VOCAB_SIZE, ENDS, allowed, None, pending.unmasked)
    draws = Draws()
    add_draws(draws, Sampler(VOCAB_SIZE), logits.copy(), rows)
    return draws


def drawn_masked(one: ScheduledSequence, mask: np.ndarray, logits: np.ndarray) -> int:
    """What the same row draws with this mask."""
    padded = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
    padded[:VOCAB_SIZE] = mask
    words = np.packbits(padded, bitorder="little").view(np.int32)[np.newaxis]
    rows = sampled_rows(batch_of([one]), VOCAB_SIZE, ENDS, AllowedTokens(np.zeros(1, int), words))
    draws = Draws()
    add_draws(draws, Sampler(VOCAB_SIZE), logits.copy(), rows)
    return draws.token_ids[0]


@pytest.mark.parametrize("proposes", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 3.0])
def test_the_same_token_as_with_a_mask(temperature: float, proposes: bool) -> None:
    """Allowed, forced and refused draws, of several sequences at once, to their ends.

    Where forced tokens are proposed, they were looked for behind the step before.
    """
    rng, masks = np.random.default_rng(5), Counting(proposes=proposes)
    outputs: list[list[int]] = [[] for _ in GRAMMARS]
    for seed in range(120):
        entries = [
            entry(grammar, output, temperature=temperature, seed=seed)
            for grammar, output in zip(GRAMMARS, outputs, strict=True)
        ]
        logits = (3 * rng.normal(size=(len(entries), VOCAB_SIZE))).astype(np.float32)
        allowed = [allowed_after(*one) for one in zip(GRAMMARS, outputs, strict=True)]
        for row, mask in enumerate(allowed):
            if seed % 2:  # as from a model that knows the grammar
                logits[row, rng.choice(np.flatnonzero(mask))] += 15
        batch = batch_of(entries)
        draws = drawn(masks, batch, logits)
        assert all(draws.is_drawn)
        masks.propose(batch, [DrawnTokens((token_id,)) for token_id in draws.token_ids])
        for row, token_id in enumerate(draws.token_ids):
            one = entries[row]
            assert token_id == drawn_masked(one, allowed[row], logits[row : row + 1])
            outputs[row].append(token_id)
            if token_id == EOS_TOKEN_ID or len(outputs[row]) == 30:
                outputs[row] = []
    assert min(masks.num.values()) > 10, masks.num


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_every_token_is_accepted_or_refused_as_the_mask_says(grammar: Grammar) -> None:
    """Also behind an end, or another accepted token, that is not output: the matcher goes back."""
    masks, logits = masks_of(), np.zeros((1, VOCAB_SIZE), np.float32)
    output = answers(grammar, 3)
    for length in (*range(len(output) + 1), 1, 0):
        mask = allowed_after(grammar, output[:length])
        is_forced = mask.sum() == 1
        one = entry(grammar, output[:length], temperature=0.0)
        pending = masks.begin(batch_of([one]))
        assert pending is not None
        pending.wait()
        assert pending.unmasked is not None
        for token_id in range(VOCAB_SIZE):
            tokens = np.array([token_id])
            refused = pending.unmasked.check(logits, tokens, np.array([True]))
            if len(refused) == 0:
                assert mask[tokens[0]]
                assert tokens[0] == token_id or is_forced
            else:
                assert not mask[token_id]


def test_what_depends_on_all_allowed_tokens_has_a_mask_before() -> None:
    grammar = GRAMMARS[0]
    for given in (
        {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 0}, {"min_tokens": 2},
        {"frequency_penalty": 0.1}, {"rules": TokenRules(biases=((5, 1.0),))},
    ):  # fmt: skip
        pending = masks_of().begin(batch_of([entry(grammar, [], **given)]))
        assert pending is not None
        assert pending.unmasked is None
        assert pending.wait().mask_rows.tolist() == [0]
    greedy = entry(grammar, [], temperature=0.0, top_k=5, top_p=0.9)
    assert masks_of().begin(batch_of([greedy])).unmasked is not None  # type: ignore[union-attr]


def test_a_grammar_that_fails_draws_nothing_and_the_others_do() -> None:
    refused = Grammar(GrammarKind.REGEX, "x")

    class Matchers(hash_grammars.CompilesOnDemand):
        def matcher(self, grammar: Grammar) -> LLMatcher:
            if grammar == refused:
                raise InvalidRequest("too large")
            return hash_grammars.compiler().matcher(grammar)

    masks = GrammarMasks(
        Matchers(hash_grammars.compiler().tokenizer, []), VOCAB_SIZE, ENDS, proposes=True
    )
    logits = np.zeros((4, VOCAB_SIZE), np.float32)
    logits[3, 7] = np.nan
    entries = [
        entry(refused, [], temperature=0.0), entry(GRAMMARS[2], [], temperature=0.0),
        entry(GRAMMARS[2], [200], temperature=0.0), entry(GRAMMARS[2], [], temperature=0.0),
    ]  # fmt: skip
    batch = batch_of(entries)
    pending = masks.begin(batch)
    assert pending is not None
    rows = sampled_rows(batch, VOCAB_SIZE, ENDS, pending.wait(), None, pending.unmasked)
    draws = Draws()
    add_draws(draws, Sampler(VOCAB_SIZE), logits, rows)
    assert draws.is_drawn == [False, True, False, False]
    assert allowed_after(GRAMMARS[2], [])[draws.token_ids[1]]
    seats = batch.rows.tolist()
    assert set(pending.failures) == {seats[0], seats[2]}
    assert masks.statistics().failures == {"compile": 1, "follow": 1}


def test_depths_are_counted_from_the_likeliest_token_that_is_allowed() -> None:
    """From another token the depths differ in their last bits, which can decide a draw."""
    grammar = GRAMMARS[2]
    mask = allowed_after(grammar, [])
    first, second = np.flatnonzero(mask)[:2].tolist()
    refused_token = int(np.flatnonzero(~mask)[0])
    pending = masks_of().begin(batch_of([entry(grammar, [], temperature=1.0)]))
    assert pending is not None
    pending.wait()
    assert pending.unmasked is not None
    for likeliest, refused in ((second, []), (refused_token, [0])):
        logits = np.zeros((1, VOCAB_SIZE), np.float32)
        logits[0, likeliest] = 1
        found = pending.unmasked.check(logits, np.array([first]), np.array([True]))
        assert found.tolist() == refused


def test_a_part_of_the_rows() -> None:
    """Groups of rows are drawn one after the other."""
    masks = masks_of()
    batch = batch_of([entry(None, []), *(entry(one, [], temperature=0.0) for one in GRAMMARS[:4])])
    pending = masks.begin(batch)
    assert pending is not None
    pending.wait()
    assert pending.unmasked is not None
    assert pending.unmasked.rows.tolist() == [1, 2, 3, 4]
    part = pending.unmasked.take(np.array([4, 0, 2]))
    assert part.rows.tolist() == [0, 2]
    found = part.masked(np.array([0, 2]))
    for mask, grammar in zip(found.masks, (GRAMMARS[3], GRAMMARS[1]), strict=True):
        assert (hash_grammars.bits(mask) == allowed_after(grammar, [])).all()
    for first, second in itertools.pairwise(found.mask_rows.tolist()):
        assert first != second


class Following:
    """A matcher that counts how often it looks for forced tokens; everything is allowed."""

    def __init__(self) -> None:
        self.num_searches = 0

    def compute_ff_tokens(self) -> list[int]:
        self.num_searches += 1
        return [7, 8]

    def consume_token(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> bool:
        return True


def test_forced_tokens_are_looked_for_once_behind_the_same_tokens() -> None:
    matcher = Following()
    held = HeldMatcher(GRAMMARS[0], cast(LLMatcher, matcher), [])
    assert held.next_forced() == [7, 8]
    held.forced, held.num_before = (7, 8), 0
    assert held.next_forced() == (7, 8)
    assert matcher.num_searches == 1
    held.move([7])
    assert held.next_forced() == [7, 8]
    assert matcher.num_searches == 2
    held.forced, held.num_before = (8,), 1
    held.move([9])  # as many tokens, but others
    assert held.next_forced() == [7, 8]
    assert matcher.num_searches == 3
