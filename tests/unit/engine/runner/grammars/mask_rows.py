"""Masks of rows that follow grammars."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.grammar import Grammar
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.runner.grammars.masks import GrammarMasks
from tests.support.engine import hash_grammars
from tests.support.engine.hash_grammars import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    allowed_after,
)

PROMPT = [1, 2, 3]


def masks_of(*, proposes: bool = True) -> GrammarMasks:
    return GrammarMasks(
        hash_grammars.compiler(),
        VOCAB_SIZE,
        frozenset({EOS_TOKEN_ID}),
        proposes=proposes,
    )


def entry(
    grammar: Grammar | None, output: list[int], drafts: list[int] | None = None, **given: Any
) -> ScheduledSequence:
    """A decoding sequence, and its drafts."""
    drafts = drafts or []
    known = [*PROMPT, *output]
    params = SamplingParams(max_tokens=100, grammar=grammar, **given)
    return ScheduledSequence(
        0,
        [known[-1], *drafts],
        len(known) - 1,
        [0],
        SampleInput(params, len(output), PROMPT, output),
        len(drafts),
    )


def answers(grammar: Grammar, seed: int) -> list[int]:
    """An output that the grammar allows, drawn at random, without its end."""
    rng, output = np.random.default_rng(seed), list[int]()
    while len(output) < 30:
        ids = np.flatnonzero(allowed_after(grammar, output))
        token_id = int(rng.choice(ids))
        if token_id == EOS_TOKEN_ID:
            break
        output.append(token_id)
    return output
