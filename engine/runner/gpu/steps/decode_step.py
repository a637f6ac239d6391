"""Steps of one or a few rows a sequence, as graphs: from rows on the host to tokens on the host.

A graph holds the layers, the head and the draw. The tokens of a step also stay on the card, where
the next step can read them. So the next step can be queued, in one copy and one launch, after the
copy of these tokens to the host and before the host has read them. A row has the same bits whether
its token comes from the host or from the step before.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from engine.runner.gpu.cuda_driver import Device, Graph
from engine.runner.gpu.launches import Bound, Launches
from engine.runner.gpu.steps.piece_lists import PieceLists, list_all, lists_in
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.gpu.steps.step_rows import NO_ROW, DecodeRoom, StepRows


@dataclass(frozen=True, slots=True)
class DrawWays:
    """The draw after each row: a temperature, 0 for the likeliest token, and its noise."""

    temperatures: np.ndarray
    seeds: np.ndarray
    indices: np.ndarray

    def take(self, rows: np.ndarray) -> DrawWays:
        """Return the draws of these rows."""
        return DrawWays(self.temperatures[rows], self.seeds[rows], self.indices[rows])


def graph_sizes(most: int) -> list[int]:
    """Return the numbers of sequences for which a graph is recorded: none pads by over a third."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if size < most]
    sizes += range(192, most, 64)
    return [*sizes, most]


def draw_sizes(num_slices: int, num_rows: int) -> dict[str, int]:
    """Return the bytes of each buffer that a draw of `num_rows` rows writes."""
    return {
        "best_scores": 8 * num_rows * num_slices,
        "best_tokens": 4 * num_rows * num_slices,
        "drawn": 4 * num_rows,
    }


class DecodeSteps:
    """Steps without chunks, up to those of `room`; of at most `most_drawn` rows, drawn on the card.

    `sizes[rows_each]` are the numbers of sequences for which there are graphs.
    """

    def __init__(
        self, device: Device, memory: StepMemory, stream: int, room: DecodeRoom, table_width: int,
        most_drawn: int, rules: Mapping[str, tuple[int, ...]],
    ) -> None:  # fmt: skip
        """Take the buffers of a step, with those of `draw_sizes`.

        `rules` are arrays for the draws after a graph: they are staged before the rows of a step,
        so that one copy brings the rules of a step and the rows of the next one.
        """
        self._device, self._memory, self._stream = device, memory, stream
        self.sizes = {each: graph_sizes(most) for each, (most, _) in room.most.items()}
        self._width = table_width
        self._most_drawn = most_drawn
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._make: Launches | None = None
        self._pieces: PieceLists = {}
        num_sequences = max(most for most, _ in room.most.values())
        num_rows = max(each * sizes[-1] for each, sizes in self.sizes.items())
        rows = (num_rows,)
        self.staging = Staging(
            device,
            {
                **rules, "tokens": rows, "sources": rows, "positions": rows, "slots": rows,
                "temperatures": rows, "indices": rows, "seeds": (*rows, 2),
                "last_positions": (num_sequences,), "tables": (num_sequences, table_width),
            },
        )  # fmt: skip
        self._pinned = device.allocate_pinned(4 * num_rows)
        self._tokens = self._pinned.host_bytes().view(np.int32)
        self._are_read = device.event()
        self._num_read = 0

    def use(self, make: Launches) -> None:
        """Make launches with `make` from now on."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._make, self._pieces = make, lists_in(self._memory, make.spec)

    def record_graphs(self) -> None:
        """Record the graphs of all sizes."""
        for rows_each, sizes in self.sizes.items():
            for size in sizes:
                self._graph(size, rows_each)

    def num_sequences(self, rows: StepRows) -> int:
        """Return the number of sequences, with padding, of a step of these rows."""
        sizes = self.sizes[rows.rows_each]
        return sizes[bisect.bisect_left(sizes, rows.num_singles)]

    def begin(self, rows: StepRows, ways: DrawWays | None) -> bool:
        """Queue a step of rows without chunks; return whether it draws as `ways` say.

        It does not draw without `ways`, nor with too many rows to draw at once. Its input tokens
        are read from the step before where `rows.sources` says so.
        """
        self.staging.wait()
        self.put(rows, ways)
        self.staging.send(self._stream)
        self.launch(rows)
        num_rows = rows.rows_each * self.num_sequences(rows)
        return ways is not None and num_rows <= self._most_drawn

    def launch(self, rows: StepRows) -> None:
        """Queue the graph of a step of these rows, which are on the card then."""
        self._graph(self.num_sequences(rows), rows.rows_each).launch(self._stream)

    def read(self, count: int) -> None:
        """Queue the copy of `count` tokens to the host, after the launches that draw them."""
        self._device.copy(self._pinned.address, self._memory["drawn"], 4 * count, self._stream)
        self._are_read.record(self._stream)
        self._num_read = count

    def tokens(self) -> np.ndarray:
        """Wait for the tokens that were read last, and for no later work; int32 `[rows]`.

        They are -1 where logits are not finite.
        """
        self._are_read.wait()
        return self._tokens[: self._num_read].copy()

    def put(self, rows: StepRows, ways: DrawWays | None) -> None:
        """Stage the rows of a step."""
        staging, count, num_sequences = self.staging, rows.count, self.num_sequences(rows)
        num_rows = rows.rows_each * num_sequences
        staging.put("tokens", rows.tokens, num_rows)
        sources = np.full(count, NO_ROW) if rows.sources is None else rows.sources
        staging.put("sources", sources, num_rows, NO_ROW)
        staging.put("positions", rows.positions, num_rows, NO_ROW)
        staging.put("slots", rows.slots, num_rows, NO_ROW)
        if ways is None:
            staging.put("temperatures", np.zeros(0, np.int32), num_rows)
        else:
            staging.put("temperatures", ways.temperatures.view(np.int32), num_rows)
            staging.put("indices", ways.indices, num_rows)
            staging.put("seeds", ways.seeds.view(np.int32).reshape(-1, 2))
        if rows.rows_each > 1:
            staging.put("last_positions", rows.last_positions, num_sequences, NO_ROW)
        staging.put("tables", rows.single_tables)

    def _graph(self, num_sequences: int, rows_each: int) -> Graph:
        """Return the graph of a step of this size, recorded at its first use."""
        key = num_sequences, rows_each
        if key not in self._graphs:
            launches = self.launches(num_sequences, rows_each)

            def launch() -> None:
                for one in launches:
                    one(self._stream)

            self._graphs[key] = self._device.capture(self._stream, launch)
        return self._graphs[key]

    def launches(
        self, num_sequences: int, rows_each: int = 1, layers: Iterable[int] | None = None
    ) -> list[Bound]:
        """Return a step's launches, of all layers or of these.

        The lists of pieces, one for each window, and the embedding come first, then nine for each
        layer, or more with experts, and the head and the draw, three in all.
        """
        make, memory, staging = self._make, self._memory, self.staging
        assert make is not None
        num_rows = num_sequences * rows_each
        # The position of a sequence's only row is its last one.
        lasts = staging["positions" if rows_each == 1 else "last_positions"]
        found = [
            *list_all(
                make, self._pieces, lasts, (staging["tables"], self._width), num_sequences,
                rows_each,
            ),
            make.embed(
                staging["tokens"], memory["hidden"], memory["normed"], num_rows,
                drawn=(staging["sources"], memory["drawn"]),
            ),
        ]  # fmt: skip
        for index in range(make.spec.num_layers) if layers is None else layers:
            found += make.layer(
                index, memory, num_rows, staging["positions"], staging["slots"],
                lambda layer: attend_few(
                    make, memory, self._pieces, lasts, layer, num_sequences, rows_each
                ),
            )  # fmt: skip
        if num_rows > self._most_drawn:
            return found
        return [
            *found,
            make.product(
                memory["normed"], make.weights.head, memory["logits"], num_rows, is_float=True
            ),
            *make.draw_rows(
                memory["logits"],
                (staging["temperatures"], staging["seeds"], staging["indices"]),
                (memory["best_scores"], memory["best_tokens"]), memory["drawn"], num_rows,
            ),
        ]  # fmt: skip

    def close(self) -> None:
        """Free the graphs and the allocations of this object."""
        for graph in self._graphs.values():
            graph.close()
        self._are_read.close()
        self._pinned.close()
        self.staging.close()


def attend_few(
    make: Launches, memory: StepMemory, pieces: PieceLists, last_positions: int, layer: int,
    num_sequences: int, rows_each: int = 1,
) -> tuple[Bound, Bound]:  # fmt: skip
    """Return the attention of the first sequences, whose rows end at `last_positions`."""
    return make.attention.attend_pieces(
        layer, memory["queries"], last_positions, pieces[make.spec.window_of(layer)],
        (memory["totals"], memory["tops"]), memory["attended"], num_sequences, rows_each,
    )  # fmt: skip
