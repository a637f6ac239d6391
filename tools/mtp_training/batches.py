"""Conversations as padded training batches."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tools.mtp_training.work_folder import Conversation

DRAFTS = 3
"""The number of consecutive drafts that the layer learns to make."""
_BATCH_ROWS = 1024
_SORTED_TOGETHER = 96
"""Conversations that are sorted by length together, so that a batch's are of similar length."""
_HELD_OUT_PART = 32
"""One conversation of this many is kept for measuring."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations side by side; `width` is the longest answer's number of rows.

    token_ids: `[batch, length + 1 + DRAFTS]`; states: `[batch, length, hidden_size]`
    num_tokens: `[batch]`, without the padding
    rows: positions `[batch, width]` from which a first draft within the answer can be made
    anchors: those of `rows`, `[batch, count]`, that go on to later drafts

    Draft s (from 1) made at position i is for token i + s + 1. Padding of `rows` and `anchors`
    is a position from which the first draft would be past the end.
    """

    token_ids: np.ndarray
    states: np.ndarray
    num_tokens: np.ndarray
    rows: np.ndarray
    anchors: np.ndarray


def split_held_out(
    conversations: Sequence[Conversation],
) -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations to train on and to measure on.

    A prompt made out of an answer goes to the same part as that answer.
    """
    parts: tuple[list[Conversation], list[Conversation]] = ([], [])
    for conversation in conversations:
        root = conversation.key.split("+")[0]
        parts[zlib.crc32(root.encode()) % _HELD_OUT_PART == 0].append(conversation)
    return parts


def plan_batches(lengths: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Yield the indices of each batch's conversations, epoch after epoch without end."""
    for epoch in itertools.count():
        draw = np.random.default_rng((seed, epoch))
        order = draw.permutation(len(lengths))
        batches: list[list[int]] = []
        for first in range(0, len(order), _SORTED_TOGETHER):
            part = sorted(order[first : first + _SORTED_TOGETHER], key=lambda i: lengths[i])
            batch: list[int] = []
            for index in part:
                if batch and (len(batch) + 1) * lengths[index] > _BATCH_ROWS:
                    batches.append(batch)
                    batch = []
                batch.append(int(index))
            batches.append(batch)
        for place in draw.permutation(len(batches)):
            yield batches[place]


def make_batch(
    conversations: Sequence[Conversation], share: float, draw: np.random.Generator
) -> Batch:
    """Pad them; a `share` of each answer's positions, drawn at random, are anchors."""
    length = max(len(c.token_ids) - 1 for c in conversations)
    size = conversations[0].states.shape[1]
    token_ids = np.zeros((len(conversations), length + 1 + DRAFTS), np.int64)
    states = np.zeros((len(conversations), length, size), np.float32)
    rows, anchors = [], []
    for i, c in enumerate(conversations):
        token_ids[i, : len(c.token_ids)] = c.token_ids
        states[i, : len(c.states)] = c.states
        possible = np.arange(c.prompt_len - 1, len(c.token_ids) - 2)
        rows.append(possible)
        count = int(np.ceil(share * len(possible)))
        anchors.append(np.sort(draw.choice(possible, count, replace=False)))
    num_tokens = np.array([len(c.token_ids) for c in conversations])
    return Batch(
        token_ids,
        states,
        num_tokens,
        _padded(rows, num_tokens - 2),
        _padded(anchors, num_tokens - 2),
    )


def _padded(pieces: Sequence[np.ndarray], fill: np.ndarray) -> np.ndarray:
    """Return `[len(pieces), longest (at least 1)]`; row i is padded with `fill[i]`."""
    width = max(1, *map(len, pieces))
    padded = np.repeat(fill[:, None], width, axis=1)
    for row, piece in zip(padded, pieces, strict=True):
        row[: len(piece)] = piece
    return padded
