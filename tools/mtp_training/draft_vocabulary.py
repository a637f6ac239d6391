"""The tokens that can be drafted: those that answers are most likely to use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tools.mtp_training.work_folder import Conversation

_SAMPLED_STATES = 12_000
_STATES_AT_ONCE = 512


def rank_tokens(
    conversations: Sequence[Conversation],
    head: np.ndarray,
    always: frozenset[int],
    draw: np.random.Generator,
) -> np.ndarray:
    """Return all token ids, best first; `always` come before all others.

    `head` is `[vocab_size, hidden_size]`. A token's score is its share among the tokens of
    conversations, each counted once per conversation, since small models repeat themselves, plus
    its mean probability in answers. The probability covers tokens that the corpus is too small to
    contain.
    """
    vocab_size = len(head)
    counts = np.zeros(vocab_size)
    for c in conversations:
        counts[np.unique(c.token_ids)] += 1
    expected = np.zeros(vocab_size)
    states = _sampled_states(conversations, draw)
    for first in range(0, len(states), _STATES_AT_ONCE):
        logits = states[first : first + _STATES_AT_ONCE].astype(np.float32) @ head.T
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected += (chances / chances.sum(axis=1, keepdims=True)).sum(axis=0)
    scores = counts / counts.sum() + expected / expected.sum()
    scores[sorted(always)] = np.inf
    return np.argsort(-scores, kind="stable")


def _sampled_states(conversations: Sequence[Conversation], draw: np.random.Generator) -> np.ndarray:
    """Return states that chose answers' tokens, `[at most _SAMPLED_STATES, hidden_size]`."""
    states = np.concatenate([c.states[c.prompt_len - 1 :] for c in conversations])
    count = min(_SAMPLED_STATES, len(states))
    return np.asarray(states[draw.choice(len(states), count, replace=False)])


def share_inside(conversations: Sequence[Conversation], ids: np.ndarray) -> float:
    """Return the share of answers' tokens that are among `ids`."""
    tokens = np.concatenate([c.token_ids[c.prompt_len :] for c in conversations])
    return float(np.isin(tokens, ids).mean())
