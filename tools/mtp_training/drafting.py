"""Drafts for training and measuring: the layer on true states, then on its own outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.runner.paddle_import import paddle
from tools.mtp_training.batches import DRAFTS, Batch
from tools.mtp_training.mtp_layer import KeyValue, MtpLayer, unit_rms

_MASKED = -1e9
_LABEL_TEMPERATURE = 0.8
_DRAFT_WEIGHTS = (1.0, 0.6, 0.4)
_STATE_WEIGHT = 1.0
_OUTSIDE = -1
_SAMPLED_RARE = 512
"""The number of rare tokens that are sampled for one step's loss, for all rare ones."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The n-th drafts of a batch, if they lie in answers: their inputs and the right tokens.

    outputs: the layer's `[drafts, hidden_size]`; true_states: the target's, of the same shape
    targets: token ids `[drafts]`
    conversations, positions: `[drafts]`, where the first draft of each was made
    """

    outputs: paddle.Tensor
    true_states: paddle.Tensor
    targets: np.ndarray
    conversations: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, slots=True)
class _Shortlist:
    """The tokens of one step's loss: their rows of the head, and the correction of their logits.

    A sampled token represents several, so its logit is raised by the logarithm of that number: the
    sum in the softmax is then right on average. `index_of` are their indices by token id.
    """

    head: paddle.Tensor
    raised: paddle.Tensor
    index_of: np.ndarray


class Drafter:
    """The layer with the target's frozen embedding and head."""

    def __init__(
        self,
        layer: MtpLayer,
        embedding: np.ndarray,
        head: np.ndarray,
        draft_ids: np.ndarray,
        common_ids: np.ndarray,
    ) -> None:
        """Prepare the head.

        `embedding` and `head` are `[vocab_size, hidden_size]`; `common_ids`, of `draft_ids`, take
        part in every step's loss.
        """
        self._layer, self._embedding, self._all_heads = layer, embedding, head
        self._draft_ids, self._common_ids = draft_ids, common_ids
        self._head = paddle.to_tensor(head[draft_ids])
        self._index_of = _indices(draft_ids, len(head))

    def loss(self, batch: Batch, draw: np.random.Generator) -> paddle.Tensor:
        """Return a scalar: cross entropy with the target's choice, and distance from its states."""
        shortlist = self._draw_shortlist(batch, draw)
        total = paddle.zeros([])
        for weight, drafts in zip(_DRAFT_WEIGHTS, self.drafts(batch), strict=True):
            inside = np.flatnonzero(shortlist.index_of[drafts.targets] != _OUTSIDE)
            if inside.size:
                rows = paddle.to_tensor(inside)
                total = total + weight * self._loss_of(drafts, rows, shortlist)
        return total

    def _draw_shortlist(self, batch: Batch, draw: np.random.Generator) -> _Shortlist:
        said = np.intersect1d(batch.token_ids, self._draft_ids)
        certain = np.union1d(self._common_ids, said)
        rare = np.setdiff1d(self._draft_ids, certain)
        sampled = draw.choice(rare, min(_SAMPLED_RARE, len(rare)), replace=False)
        ids = np.concatenate([certain, sampled])
        raised = np.zeros(len(ids), np.float32)
        raised[len(certain) :] = np.log(len(rare) / max(1, len(sampled))) if len(rare) else 0
        return _Shortlist(
            paddle.to_tensor(self._all_heads[ids]),
            paddle.to_tensor(raised),
            _indices(ids, len(self._all_heads)),
        )

    def accepted(self, batch: Batch) -> np.ndarray:
        """Return int64 `[batch, width, DRAFTS]` for the rows: 1 right, 0 wrong, -1 not made."""
        outcome = np.full((*batch.rows.shape, DRAFTS), -1, np.int64)
        with paddle.no_grad():
            for index, drafts in enumerate(self.drafts(batch)):
                best = self._logits(drafts.outputs, self._head).argmax(-1).numpy()
                columns = drafts.positions - batch.rows[drafts.conversations, 0]
                is_right = best == self._index_of[drafts.targets]
                outcome[drafts.conversations, columns, index] = is_right
        return outcome

    def _loss_of(self, drafts: Drafts, rows: paddle.Tensor, shortlist: _Shortlist) -> paddle.Tensor:
        outputs = paddle.gather(drafts.outputs, rows)
        true_states = paddle.gather(drafts.true_states, rows)
        functional = paddle.nn.functional
        with paddle.no_grad():
            wanted = paddle.matmul(true_states, shortlist.head, transpose_y=True)
            labels = functional.softmax(wanted / _LABEL_TEMPERATURE + shortlist.raised)
        logits = self._logits(outputs, shortlist.head) + shortlist.raised
        entropy = functional.cross_entropy(logits, labels, soft_label=True)
        distance = functional.smooth_l1_loss(unit_rms(outputs, 1e-6), unit_rms(true_states, 1e-6))
        return entropy + _STATE_WEIGHT * distance

    def _logits(self, outputs: paddle.Tensor, head: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(self._layer.head_input(outputs), head, transpose_y=True)

    def _embed(self, token_ids: np.ndarray) -> paddle.Tensor:
        return paddle.to_tensor(self._embedding[token_ids])

    def drafts(self, batch: Batch) -> Iterator[Drafts]:
        """Yield first drafts at the batch's rows, then later ones at its anchors."""
        layer, tokens = self._layer, batch.token_ids
        count, length = batch.states.shape[:2]
        every = paddle.to_tensor(np.tile(np.arange(length), (count, 1)))
        embedded = self._embed(tokens[:, 1 : length + 1])
        joined = layer.join(embedded, paddle.to_tensor(batch.states))
        prefix = layer.keys_values(joined, every)
        output = layer.outputs(
            _gather(joined, batch.rows),
            paddle.to_tensor(batch.rows),
            prefix,
            _mask(batch.rows, length),
        )
        yield _inside(batch, output, batch.rows, 1)

        last_column = batch.rows.shape[1] - 1
        current = _gather(output, np.minimum(batch.anchors - batch.rows[:, :1], last_column))
        mask = _mask(batch.anchors, length)
        drafts: list[KeyValue] = []
        for number in range(2, DRAFTS + 1):
            at = batch.anchors + number - 1
            joined = layer.join(self._embed(np.take_along_axis(tokens, at + 1, axis=1)), current)
            drafts.append(layer.keys_values(joined, paddle.to_tensor(at)))
            current = layer.outputs(joined, paddle.to_tensor(at), prefix, mask, drafts)
            yield _inside(batch, current, batch.anchors, number)


def _inside(batch: Batch, outputs: paddle.Tensor, begun: np.ndarray, number: int) -> Drafts:
    """Return drafts `number` from `outputs` `[batch, rows, size]`, begun at `[batch, rows]`."""
    conversations, columns = np.nonzero(begun + number + 1 < batch.num_tokens[:, None])
    positions = begun[conversations, columns]
    flat = paddle.to_tensor(conversations * begun.shape[1] + columns)
    return Drafts(
        paddle.gather(outputs.reshape([-1, outputs.shape[-1]]), flat),
        paddle.to_tensor(batch.states[conversations, positions + number]),
        batch.token_ids[conversations, positions + number + 1],
        conversations,
        positions,
    )


def _gather(x: paddle.Tensor, columns: np.ndarray) -> paddle.Tensor:
    """Select the `columns` `[batch, count]` of each row of `[batch, rows, size]`."""
    count, length, size = x.shape
    flat = (np.arange(count)[:, None] * length + columns).ravel()
    return paddle.gather(x.reshape([-1, size]), paddle.to_tensor(flat)).reshape([count, -1, size])


def _indices(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return each token's index in `ids`, `_OUTSIDE` for tokens that are not in it."""
    indices = np.full(vocab_size, _OUTSIDE, np.int64)
    indices[ids] = np.arange(len(ids))
    return indices


def _mask(last_keys: np.ndarray, num_keys: int) -> paddle.Tensor:
    """Return float32 `[batch, 1, 1, rows, num_keys]`: 0 up to each row's last key, else tiny."""
    is_hidden = np.arange(num_keys) > last_keys[:, :, None]
    masked = np.where(is_hidden, np.float32(_MASKED), np.float32(0))
    return paddle.to_tensor(masked[:, None, None])
