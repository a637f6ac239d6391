"""The weights of an MTP layer's products as they are packed: in groups of 8 bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from engine.runner.mtp.mtp_weights import MtpWeights
from engine.runner.weights.derived.quantised_source import QuantisedSource
from engine.runner.weights.stored_formats import quantise
from engine.runner.weights.stored_tensor import GROUP_SIZES, GroupedTensor
from engine.runner.weights.tensor_source import TensorSource

EMBEDDING_PROJECTION = "projection of the embedding"
STATE_PROJECTION = "projection of the hidden state"
DRAFT_HEAD = "head of the tokens that are drafted"
_FORMAT = "Q8_0"


def mtp_in_groups(weights: MtpWeights) -> QuantisedSource:
    """Return the layer's own tensors, those of its products in groups."""
    return QuantisedSource(weights.files, _FORMAT)


class DraftSource(TensorSource):
    """The layer's tensors by their names, and what is made of others under the names above.

    A step of few rows takes as long as reading its weights from memory, and drafts change no
    answer. Weights whose rows are no whole groups stay as they are. `head_rows` returns the rows of
    the target's head for the tokens that can be drafted, `[tokens, hidden_size]`; it is called
    where they are packed, and only if not all tokens can be drafted.
    """

    def __init__(
        self, weights: MtpWeights, hidden_size: int, head_rows: Callable[[], np.ndarray]
    ) -> None:
        self._weights, self._head_rows = weights, head_rows
        self._files = mtp_in_groups(weights)
        self.metadata = weights.files.metadata
        square = (hidden_size, hidden_size)
        self._made = {EMBEDDING_PROJECTION: square, STATE_PROJECTION: square}
        if weights.draft_token_ids is not None:
            self._made[DRAFT_HEAD] = (len(weights.draft_token_ids), hidden_size)

    def names(self) -> Iterable[str]:
        return [*self._made, *self._files.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._made.get(name) or self._files.shape(name)

    def check(
        self,
        source: Path,
        name: str,
        shape: tuple[int, ...],
        dtypes: Sequence[str] | None = None,
    ) -> None:
        self._files.check(source, name, shape, dtypes)

    def format_and_shape(self, name: str) -> tuple[str, tuple[int, int]]:
        shape = self._made.get(name)
        if shape is None:
            return self._files.format_and_shape(name)
        return (_FORMAT if shape[1] % GROUP_SIZES[_FORMAT][0] == 0 else "F32"), shape

    def grouped(self, name: str) -> GroupedTensor:
        if name not in self._made:
            return self._files.grouped(name)
        stored, shape = self.format_and_shape(name)
        values = self._values(name)
        if stored == _FORMAT:
            return quantise(values, _FORMAT)
        return GroupedTensor("F32", shape, values.view(np.uint8).reshape(shape[0], -1))

    def identity(self) -> str:
        described = f"{self._weights.identity()} {self._weights.target_identity()} {_FORMAT}"
        return hashlib.sha256(described.encode()).hexdigest()

    def stamps(self) -> list[list[int]]:
        return self._files.stamps()

    def _values(self, name: str) -> np.ndarray:
        if name == DRAFT_HEAD:
            return self._head_rows()
        token, hidden = self._weights.projections()
        return token if name == EMBEDDING_PROJECTION else hidden
