"""Attention over tiles of keys in plain Paddle operators, for any rows, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.runner.cache.kv_cache import KVCache
from engine.runner.cache.kv_formats import widened_items
from engine.runner.flat_batch import FlatBatch
from engine.runner.paddle.attention_tiles import BlockTile, TileGroup, TileLimits, plan_tiles
from engine.runner.paddle.device_arrays import to_device
from engine.runner.paddle_import import paddle
from engine.runner.weights.spec.model_spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class _Group:
    """A `TileGroup` on the device, with the masks of its tiles.

    `rows` is flat. A tile's first mask, `[items, 1, rows, 1, keys]`, is true for keys that the row
    does not see; its second, `[items, 1, keys, 1]`, for keys after the item. None: all are false.
    """

    num_items: int
    num_rows: int
    rows: paddle.Tensor
    tables: paddle.Tensor
    tiles: tuple[BlockTile, ...]
    masks: tuple[tuple[paddle.Tensor | None, paddle.Tensor | None], ...]


class TiledAttention:
    """Attends for all items of a group together, one tile of keys after the other.

    A softmax is computed in the order of positions: the largest score, the sum of the weights and
    the weighted values so far are kept, and corrected by each further tile.
    """

    def __init__(self, spec: DecoderSpec, cache: KVCache, dtype: str, window: int = 0) -> None:
        """Attend in `dtype`, whatever the cache stores, to `window` positions, 0: to all."""
        self._dtype, self._stored = dtype, cache.layout.dtype
        self._block_size = cache.layout.block_size
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._head_dim, self._score_scale = spec.head_dim, spec.score_scale
        self._limits = TileLimits(
            block_size=self._block_size,
            num_heads=spec.num_heads,
            kv_width=spec.num_kv_heads * spec.head_dim,
            window=window,
        )
        # Finite: a row that sees nothing of its first tile sums keys with this score, and the
        # first key that it sees takes their weight, e^(lowest - score), which is zero.
        self._lowest = paddle.full([], np.finfo(np.float32).min, "float32")
        self._zero = paddle.zeros([], dtype)

    def begin(self, batch: FlatBatch, sequences: np.ndarray) -> np.ndarray:
        """Send the device what all layers share, for `sequences`, one or more indices of the batch.

        Returns the batch's row of each row that `attend` returns. Rows may be repeated.
        """
        groups = plan_tiles(batch, sequences, self._limits)
        width = max(group.tables.shape[1] for group in groups) * self._block_size
        arrays = [np.arange(width)]
        for group in groups:
            arrays += [group.rows.reshape(-1), group.positions, group.tables]
        key_positions, *rest = to_device(*arrays)
        self._groups = [
            self._group(group, key_positions, *rest[at : at + 3])
            for group, at in zip(groups, range(0, len(rest), 3), strict=True)
        ]
        return np.concatenate([group.rows.reshape(-1) for group in groups])

    def attend(
        self,
        query: paddle.Tensor,
        keys: paddle.Tensor,
        values: paddle.Tensor,
        sinks: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Return `[rows, heads, head_dim]` for the queries of the whole batch.

        `keys` and `values` are the layer's cache, `[num_blocks, kv_heads, block_size, slot items]`,
        which holds the batch's own. `sinks`, float32 `[heads]`, are scores without values.
        """
        parts = [self._attend_group(group, query, keys, values, sinks) for group in self._groups]
        return paddle.concat(parts)

    def _group(
        self,
        group: TileGroup,
        key_positions: paddle.Tensor,
        rows: paddle.Tensor,
        positions: paddle.Tensor,
        tables: paddle.Tensor,
    ) -> _Group:
        masks = []
        for tile in group.tiles:
            num = tile.num_items
            keys = key_positions[tile.first * self._block_size : tile.end * self._block_size]
            hidden = after_item = None
            if tile.has_hidden:
                own = positions[:num].reshape([num, 1, -1, 1, 1])
                hidden = keys > own
                if self._limits.window:
                    hidden = hidden | (keys <= own - self._limits.window)
            if tile.has_unwritten:
                after_item = keys.reshape([1, 1, -1, 1]) > positions[:num, -1].reshape(
                    [-1, 1, 1, 1]
                )
            masks.append((hidden, after_item))
        num_items, num_rows = group.rows.shape
        return _Group(num_items, num_rows, rows, tables, group.tiles, tuple(masks))

    def _attend_group(
        self,
        group: _Group,
        query: paddle.Tensor,
        keys: paddle.Tensor,
        values: paddle.Tensor,
        sinks: paddle.Tensor | None,
    ) -> paddle.Tensor:
        """Return `[items * rows, heads, head_dim]`."""
        items, num_rows = group.num_items, group.num_rows
        by_head = [items, num_rows, self._num_kv_heads, -1, self._head_dim]
        rows = query[group.rows].reshape(by_head).transpose([0, 2, 1, 3, 4])
        rows = rows.reshape([items, self._num_kv_heads, -1, self._head_dim])
        rows = rows * self._score_scale
        finished: list[paddle.Tensor] = []
        # The largest score, the sum, the weighted values.
        so_far = () if sinks is None else self._begun(sinks, items, num_rows)
        for tile, masks in zip(group.tiles, group.masks, strict=True):
            num = tile.num_items
            if so_far and num < so_far[0].shape[0]:
                _, total, summed = so_far
                finished.append(summed[num:] / total[num:])
                so_far = tuple(one[:num] for one in so_far)
            blocks = group.tables[:num, tile.first : tile.end]
            scores, past = self._tile(blocks, masks, rows[:num], keys, values)
            so_far = _joined(so_far, scores, past)
        _, total, summed = so_far
        finished.append(summed / total)
        out = paddle.concat(finished[::-1]).astype(query.dtype)
        out = out.reshape([items, self._num_kv_heads, num_rows, -1, self._head_dim])
        out = out.transpose([0, 2, 1, 3, 4])
        return out.reshape([items * num_rows, self._num_heads, self._head_dim])

    def _begun(self, sinks: paddle.Tensor, items: int, num_rows: int) -> tuple[paddle.Tensor, ...]:
        """Return what `_joined` does after the sinks alone: a sink weighs 1, and has no value."""
        by_head = sinks.reshape([1, self._num_kv_heads, 1, -1])
        shape = [items, self._num_kv_heads, num_rows, by_head.shape[-1]]
        highest = by_head.expand(shape).reshape([items, self._num_kv_heads, -1, 1])
        nothing = paddle.zeros([*highest.shape[:3], self._head_dim], "float32")
        return highest, paddle.ones_like(highest), nothing

    def _tile(
        self,
        blocks: paddle.Tensor,
        masks: tuple[paddle.Tensor | None, paddle.Tensor | None],
        rows: paddle.Tensor,
        keys: paddle.Tensor,
        values: paddle.Tensor,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return float32 scores `[items, kv_heads, rows, keys]` and the tile's values."""
        num, width = blocks.shape
        shape = [num, width, self._num_kv_heads, self._block_size, -1]
        flat = blocks.reshape([-1])

        def gathered(part: paddle.Tensor) -> paddle.Tensor:
            found = paddle.gather(part, flat).reshape(shape).transpose([0, 2, 1, 3, 4])
            found = widened_items(found, self._stored, self._dtype)
            return found.reshape([num, self._num_kv_heads, -1, self._head_dim])

        scores = paddle.matmul(rows, gathered(keys), transpose_y=True).astype("float32")
        past = gathered(values)
        hidden, after_item = masks
        if hidden is not None:
            by_row = [num, self._num_kv_heads, hidden.shape[2], -1, hidden.shape[4]]
            masked = paddle.where(hidden, self._lowest, scores.reshape(by_row))
            scores = masked.reshape(scores.shape)
        if after_item is not None:
            # A weight of zero does not hide a NaN that lies in a slot nobody has written.
            past = paddle.where(after_item, self._zero, past)
        return scores, past


def _joined(
    so_far: tuple[paddle.Tensor, ...], scores: paddle.Tensor, past: paddle.Tensor
) -> tuple[paddle.Tensor, ...]:
    """Return the largest score, the sum of weights and the weighted values with one more tile."""
    highest = scores.max(axis=-1, keepdim=True)
    if so_far:
        highest = paddle.maximum(highest, so_far[0])
    weights = paddle.exp(scores - highest)
    total = weights.sum(axis=-1, keepdim=True)
    summed = paddle.matmul(weights.astype(past.dtype), past).astype("float32")
    if not so_far:
        return highest, total, summed
    before, old_total, old_summed = so_far
    # Of whole vectors: on a CPU the elements after the last one round differently.
    scale = paddle.exp((before - highest).expand(summed.shape))
    return highest, old_total * scale[..., :1] + total, old_summed * scale + summed
