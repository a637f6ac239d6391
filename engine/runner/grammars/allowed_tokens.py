"""The tokens that the rows of a step may draw, as masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Row r of a step's draws has mask `masks[mask_rows[r]]`, none below 0.

    A mask has a bit for each token, 32 to a word, lowest first. One without a bit fails its row.
    """

    mask_rows: np.ndarray
    masks: np.ndarray

    def take(self, rows: np.ndarray) -> AllowedTokens:
        """Return these rows."""
        return AllowedTokens(self.mask_rows[rows], self.masks)

    def allows(self, token_ids: np.ndarray) -> np.ndarray:
        """Return which rows may draw these tokens, one for each row."""
        has_mask = self.mask_rows >= 0
        is_allowed = ~has_mask
        tokens = token_ids[has_mask]
        words = self.masks.view(np.uint32)[self.mask_rows[has_mask], tokens // 32]
        is_allowed[has_mask] = words >> (tokens % 32).astype(np.uint32) & np.uint32(1)
        return is_allowed
