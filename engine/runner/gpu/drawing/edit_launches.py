"""Biases, penalties and withheld tokens: sent as lists, and the launches that apply them.

A step's rows may have more tokens before them than there is room for on the card. Then penalties
are applied in rounds: one round is read before the next copy begins, as both are on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.runner.drawing.sampler import SampledRows
from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.kernels import edits
from engine.runner.gpu.launches import DRAW_SLICE, Bound, Launches
from engine.runner.gpu.steps.staging import Staging

HISTORY_TOKENS = 1 << 17
"""Tokens before penalised rows that are on the card at a time, unless one sequence has more."""
LISTED_TOKENS = 1 << 14
"""Biases, or withheld tokens, that are on the card at a time. A row has at most 1,024 of them."""
_TILE = 1024
_LISTED_TILE = 128

_LISTED = {"logits": "*fp32", "starts": "*i32", "tokens": "*i32", "values": "*fp32"}
_PENALISED = {
    "logits": "*fp32", "starts": "*i32", "prompts": "*i32", "ends": "*i32", "histories": "*i32",
    "repetitions": "*fp32", "frequencies": "*fp64", "presences": "*fp64",
}  # fmt: skip


def has_edits(rows: SampledRows) -> np.ndarray:
    """Return which rows have biases, penalties or withheld tokens, bool `[rows]`."""
    found: np.ndarray = (rows.ways["has_penalties"] != 0) | (np.diff(rows.withheld_starts) > 0)
    return found if rows.biases is None else found | rows.biases.has_rows


class LogitEdits:
    """Changes the logits of rows that lie at `logits`."""

    def __init__(
        self, device: Device, stream: int, logits: int, num_rows: int, max_len: int
    ) -> None:
        """Allocate for `num_rows` rows behind at most `max_len` tokens each."""
        self._stream, self._logits = stream, logits
        self._history_tokens = max(HISTORY_TOKENS, max_len)
        self._listed_tokens = LISTED_TOKENS
        rows = (num_rows,)
        self._listed = Staging(
            device,
            {
                "starts": (num_rows + 1,), "tokens": (self._listed_tokens,),
                "values": (self._listed_tokens,),
            },
        )  # fmt: skip
        self._penalised = Staging(
            device,
            {
                "starts": rows, "prompts": rows, "ends": rows, "repetitions": rows,
                "frequencies": (num_rows, 2), "presences": (num_rows, 2),
                "histories": (self._history_tokens,),
            },
        )  # fmt: skip

    def apply(self, make: Launches, rows: SampledRows) -> None:
        """Queue all changes of the rows' logits."""
        if rows.biases is not None:
            starts, ids, values = rows.biases.starts, rows.biases.token_ids, rows.biases.values
            for some in _without_repeats(starts, ids):
                owners = np.repeat(np.arange(len(rows)), np.diff(starts))[some]
                counts = np.bincount(owners, minlength=len(rows))
                self._add(make, counts, ids[some], values[some])
        if rows.ways["has_penalties"].any():
            self._penalise(make, rows)
        if len(rows.withheld_ids):
            never = np.full(len(rows.withheld_ids), -np.inf, np.float32)
            self._add(make, np.diff(rows.withheld_starts), rows.withheld_ids, never)

    def _add(self, make: Launches, counts: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
        """Queue the launch that adds values to tokens; row r has the next `counts[r]` of them."""
        staging, starts = self._listed, np.concatenate(([0], np.cumsum(counts)))
        launch = self.bind_listed(make, len(counts))
        for first, end in _rounds(counts, self._listed_tokens):
            own = slice(starts[first], starts[end])
            staging.wait()
            staging.put("starts", np.clip(starts, starts[first], starts[end]) - starts[first])
            staging.put("tokens", ids[own])
            staging.put("values", values[own].view(np.int32))
            staging.send(self._stream)
            launch(self._stream)

    def _penalise(self, make: Launches, rows: SampledRows) -> None:
        """Queue the penalties. Rows of one sequence, those of its drafts, share its tokens."""
        ways, count = rows.ways, len(rows)
        penalised = np.flatnonzero(ways["has_penalties"])
        # Penalties of output tokens alone do not depend on the prompt.
        skipped = np.where(ways["repetition_penalty"] != 1.0, 0, rows.num_prompts)
        ends = rows.num_tokens - skipped
        seats = rows.histories[penalised]
        firsts = np.flatnonzero(np.concatenate(([True], np.diff(seats) != 0)))
        sizes = np.maximum.reduceat(ends[penalised], firsts)
        runs = np.cumsum(np.concatenate(([0], np.diff(seats) != 0)))
        launch, staging = self.bind_penalties(make, count), self._penalised
        for first, end in _rounds(sizes, self._history_tokens):
            places = np.cumsum(sizes[first:end]) - sizes[first:end]
            own = (runs >= first) & (runs < end)
            starts = np.full(count, -1)
            starts[penalised[own]] = places[runs[own] - first]
            heads = penalised[firsts[first:end]].tolist()
            histories = [
                rows.token_ids[rows.histories[row], skipped[row] : skipped[row] + size]
                for row, size in zip(heads, sizes[first:end].tolist(), strict=True)
            ]
            staging.wait()
            staging.put("starts", starts)
            staging.put("prompts", rows.num_prompts - skipped)
            staging.put("ends", ends)
            repetitions = ways["repetition_penalty"].astype(np.float32)
            staging.put("repetitions", repetitions.view(np.int32))
            staging.put("frequencies", _words(ways["frequency_penalty"]))
            staging.put("presences", _words(ways["presence_penalty"]))
            staging.put("histories", np.concatenate(histories))
            staging.send(self._stream)
            launch(self._stream)

    def bind_listed(self, make: Launches, num_rows: int) -> Bound:
        """Return the launch that adds the listed values."""
        constants = {"VOCABULARY": make.spec.vocab_size, "TILE": _LISTED_TILE}
        kernel = make.kernel(edits.add_listed, _LISTED, constants, 4, 1)
        return kernel.bind((num_rows,), self._logits, *map(self._listed.__getitem__, _in(_LISTED)))

    def bind_penalties(self, make: Launches, num_rows: int) -> Bound:
        """Return the launch that applies penalties."""
        constants = {"VOCABULARY": make.spec.vocab_size, "SLICE": DRAW_SLICE, "TILE": _TILE}
        kernel = make.kernel(edits.penalise, _PENALISED, constants, 4, 1)
        sent = map(self._penalised.__getitem__, _in(_PENALISED))
        return kernel.bind((num_rows, make.num_slices), self._logits, *sent)

    def bind_all(self, make: Launches) -> None:
        """Ask for every kernel."""
        self.bind_listed(make, 1)
        self.bind_penalties(make, 1)

    def close(self) -> None:
        """Free all memory."""
        self._listed.close()
        self._penalised.close()


def _in(types: dict[str, str]) -> list[str]:
    """Return the arguments that are staged."""
    return [name for name in types if name != "logits"]


def _words(values: np.ndarray) -> np.ndarray:
    """Return float64 values as pairs of words."""
    return np.ascontiguousarray(values).view(np.int32).reshape(-1, 2)


def _rounds(sizes: np.ndarray, room: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of entries that have at most `room` in all, each of them whole."""
    first = total = 0
    for entry, size in enumerate(sizes.tolist()):
        if total + size > room:
            yield first, entry
            first, total = entry, 0
        total += size
    if total:
        yield first, len(sizes)


def _without_repeats(starts: np.ndarray, ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yield indices that together are all of `ids`; none has a token of a row twice.

    They keep the order of a row's entries, as float32 sums must not be regrouped.
    """
    is_ascending = np.diff(ids, prepend=-1) > 0
    is_ascending[starts[:-1][np.diff(starts) > 0]] = True
    if is_ascending.all():
        yield np.arange(len(ids))
        return
    owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = np.lexsort((ids, owners))
    is_first = np.concatenate(([True], (np.diff(ids[order]) != 0) | (np.diff(owners[order]) != 0)))
    within = np.arange(len(ids))
    within -= np.maximum.accumulate(np.where(is_first, within, 0))
    for number in range(int(within.max()) + 1):
        yield np.sort(order[within == number])
