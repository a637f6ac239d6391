"""A step's draws under rules about single tokens (`common.token_rules`), row by row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.token_rules import TokenRules
from engine.runner.grammars.allowed_tokens import AllowedTokens

_MAX_MASKS = 64
"""Masks that are kept: one of 152,000 tokens takes 19 kB."""


@dataclass(frozen=True, slots=True)
class Biases:
    """Row r of a step's draws adds `values[a:b]` to the logits of `token_ids[a:b]`, where `a` and
    `b` are `starts[r]` and `starts[r + 1]`.
    """

    starts: np.ndarray
    token_ids: np.ndarray
    values: np.ndarray

    def of_row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and values of a row."""
        part = slice(self.starts[row], self.starts[row + 1])
        return self.token_ids[part], self.values[part]

    def take(self, rows: np.ndarray) -> Biases:
        """Return these rows."""
        parts = [self.of_row(row) for row in rows.tolist()]
        return _joined(parts)

    @property
    def has_rows(self) -> np.ndarray:
        """Which rows have a bias, `[rows]`."""
        return np.diff(self.starts) > 0


def _joined(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Biases:
    counts = [len(ids) for ids, _ in parts]
    return Biases(
        np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
        np.concatenate([ids for ids, _ in parts]),
        np.concatenate([values for _, values in parts]),
    )


_NONE = (np.zeros(0, np.int64), np.zeros(0, np.float32))


def biases_of(rules: Sequence[TokenRules], vocab_size: int) -> Biases | None:
    """Return the biases of rows with these rules; None where no row has one."""
    if not any(one.biases for one in rules):
        return None
    parts = []
    for one in rules:
        kept = [(token_id, bias) for token_id, bias in one.biases if 0 <= token_id < vocab_size]
        if not kept:
            parts.append(_NONE)
            continue
        ids, values = zip(*kept, strict=True)
        parts.append((np.array(ids, np.int64), np.array(values, np.float32)))
    return _joined(parts)


def banned_token_ids(rules: TokenRules, output_token_ids: np.ndarray) -> list[int]:
    """Return the tokens that would complete a bad word behind this output."""
    banned = []
    for *before, last in rules.bad_words:
        start = len(output_token_ids) - len(before)
        if start >= 0 and output_token_ids[start:].tolist() == before:
            banned.append(last)
    return banned


class AllowedMasks:
    """Masks of allowed tokens, kept for requests that have the same ones."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._masks: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def add_to(
        self, allowed: AllowedTokens | None, only: Sequence[tuple[int, ...]]
    ) -> AllowedTokens | None:
        """Return what rows may draw of which each has `only` these tokens (none: all of them), also
        under `allowed` of their grammars."""
        if not any(only):
            return allowed
        mask_rows = np.full(len(only), -1, np.int64) if allowed is None else allowed.mask_rows
        masks = [] if allowed is None else list(allowed.masks)
        mask_rows = mask_rows.copy()
        for row, token_ids in enumerate(only):
            if token_ids:
                mask = self._mask(token_ids)
                if mask_rows[row] >= 0:
                    mask = mask & masks[mask_rows[row]]
                mask_rows[row] = len(masks)
                masks.append(mask)
        return AllowedTokens(mask_rows, np.stack(masks))

    def _mask(self, token_ids: tuple[int, ...]) -> np.ndarray:
        mask = self._masks.pop(token_ids, None)
        if mask is None:
            bits = np.zeros(self._num_words * 32, np.uint8)
            ids = np.array(token_ids, np.int64)
            bits[ids[(ids >= 0) & (ids < len(bits))]] = 1
            mask = np.packbits(bits, bitorder="little").view(np.int32)
            while len(self._masks) >= _MAX_MASKS:
                self._masks.popitem(last=False)
        self._masks[token_ids] = mask
        return mask
