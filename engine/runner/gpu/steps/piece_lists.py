"""The lists of a decoding step's pieces: one for each window that layers of the model have.

Layers with the same window attend to the same pieces. A list has only pieces that some row of a
sequence sees, so programs share out what is read, however long the context is.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.runner.gpu.attention_launches import PieceList
from engine.runner.gpu.launches import Bound, Launches
from engine.runner.gpu.steps.step_memory import StepMemory
from engine.runner.weights.spec.model_spec import DecoderSpec

PieceLists = Mapping[int, PieceList]
"""The list by window; 0: of all keys."""


def windows_of(spec: DecoderSpec) -> list[int]:
    """Return the windows that layers have, ascending; 0: none."""
    return sorted({spec.window_of(layer) for layer in range(spec.num_layers)})


def longest_window(spec: DecoderSpec) -> int:
    """Return the longest window; 0: some layer attends to all keys."""
    windows = windows_of(spec)
    return windows[-1] if windows[0] else 0


def reach_of(window: int, rows_each: int) -> int | None:
    """Return how many positions before its last one a sequence of so many rows sees; None: all."""
    return window + rows_each - 2 if window else None


def _name(field: str, window: int) -> str:
    return f"{field} of {window}" if window else field


def list_sizes(
    spec: DecoderSpec, num_sequences: int, num_pieces: int, blocks_each: int
) -> dict[str, int]:
    """Return the bytes of the buffers of all lists, for pieces of `blocks_each` blocks."""
    sizes = PieceList(
        first_pieces=4 * (num_sequences + 1), piece_sequences=4 * num_pieces,
        piece_starts=4 * num_pieces, piece_lasts=4 * num_pieces,
        piece_blocks=4 * num_pieces * blocks_each,
    )  # fmt: skip
    return {
        _name(field, window): size
        for window in windows_of(spec)
        for field, size in sizes._asdict().items()
    }


def lists_in(memory: StepMemory, spec: DecoderSpec) -> PieceLists:
    """Return the lists whose buffers are in `memory`."""
    return {
        window: PieceList(*(memory[_name(field, window)] for field in PieceList._fields))
        for window in windows_of(spec)
    }


def list_all(
    make: Launches, lists: PieceLists, last_positions: int, tables: tuple[int, int],
    num_sequences: int, rows_each: int = 1,
) -> list[Bound]:  # fmt: skip
    """Return the launches that write all lists; `tables` are an address and a width."""
    return [
        make.attention.list_pieces(
            last_positions, *tables, pieces, num_sequences, reach_of(window, rows_each)
        )
        for window, pieces in lists.items()
    ]
