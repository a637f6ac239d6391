"""Log probabilities of drawn tokens and of the likeliest ones, from sums on the card.

Two kernels of the draws find each slice's largest logit and the weights below the row's largest
one, with a temperature of 1. Sums are in a fixed order of slices, and weights are the host's to the
bit. The host takes one logarithm a row, and the differences, in float64, as for its own rows.
"""

from __future__ import annotations

import math

import numpy as np

from common.request import MAX_LOGPROBS, TokenLogprobs
from engine.core.sequences.seats import NOT_ASKED
from engine.runner.gpu.cuda_driver import Device
from engine.runner.gpu.drawing.filter_launches import bind_weigh
from engine.runner.gpu.kernels import likeliest
from engine.runner.gpu.launches import DRAW_SLICE, Bound, Launches
from engine.runner.gpu.steps.staging import Staging
from engine.runner.gpu.steps.step_memory import StepMemory

_RECORD = np.dtype(
    [
        ("sum", np.float64), ("largest", np.float32), ("drawn", np.float32),
        ("logits", np.float32, MAX_LOGPROBS), ("tokens", np.int32, MAX_LOGPROBS),
    ]
)  # fmt: skip
assert _RECORD.itemsize == 4 * likeliest.WORDS.value
assert likeliest.TOPS.value == MAX_LOGPROBS
_TYPES = {
    "logits": "*fp32", "num_tops": "*i32", "best_scores": "*fp64", "best_tokens": "*i32",
    "weights": "*fp64", "slices": "i32", "sums": "*fp64", "values": "*fp32", "tokens": "*i32",
    "drawn": "*i32",
}  # fmt: skip


class CardLogprobs:
    """Log probabilities of the rows at address `logits`, in memory that the draws use too."""

    def __init__(
        self, device: Device, stream: int, logits: int, best: tuple[int, int], drawn: int,
        weighed: StepMemory, staging: Staging, num_rows: int,
    ) -> None:  # fmt: skip
        """Take the scores and tokens of slices, the drawn tokens and `counts` and `weights`.

        `staging` has the arrays of `staged_rules`.
        """
        self._device, self._stream, self._logits = device, stream, logits
        self._best, self._drawn, self._weighed = best, drawn, weighed
        self._memory = StepMemory(
            device, {"records": _RECORD.itemsize * num_rows, "greedy": 4 * num_rows}
        )
        device.fill(self._memory["greedy"], 0, 4 * num_rows, stream)
        self._staging = staging
        self._pinned = device.allocate_pinned(_RECORD.itemsize * num_rows)
        self._read = self._pinned.host_bytes().view(_RECORD)

    def put(self, num_tops: np.ndarray, vocab_size: int) -> None:
        """Stage the number of likeliest tokens of each row; `NOT_ASKED`: no log probabilities."""
        temperatures = np.where(num_tops == NOT_ASKED, 0, 1).astype(np.float32)
        self._staging.put("num_tops", np.minimum(num_tops, vocab_size))
        self._staging.put("weighed_temperatures", temperatures.view(np.int32))

    def find(self, make: Launches, num_rows: int) -> None:
        """Queue the launches that find sums and likeliest tokens.

        The logits are those before biases and penalties; scores of slices are overwritten.
        """
        for launch in self.bind_find(make, num_rows):
            launch(self._stream)

    def take_drawn(self, make: Launches, num_rows: int) -> None:
        """Queue the launch that reads the drawn tokens' logits, and the copy of all records.

        The logits are again those before biases and penalties.
        """
        self.bind_take(make, num_rows)(self._stream)
        size = _RECORD.itemsize * num_rows
        self._device.copy(self._pinned.address, self._memory["records"], size, self._stream)

    def of_row(self, row: int, num_top: int) -> TokenLogprobs:
        """Return the log probabilities of a row that has a token, once the copy has ended."""
        record = self._read[row]
        log_sum = float(record["largest"]) + math.log(record["sum"])
        tokens, logits = record["tokens"][:num_top], record["logits"][:num_top]
        top = zip(tokens.tolist(), logits.tolist(), strict=True)
        return TokenLogprobs(
            float(record["drawn"]) - log_sum, tuple((token, one - log_sum) for token, one in top)
        )

    def bind_find(self, make: Launches, num_rows: int) -> tuple[Bound, ...]:
        """Return the launches of `find`."""
        slices, staging = make.num_slices, self._staging
        records = self._memory["records"]
        constants = {
            "VOCABULARY": make.spec.vocab_size, "SLICE": DRAW_SLICE,
            "PARTS": 1 << (slices - 1).bit_length(),
        }  # fmt: skip
        nothing = self._memory["greedy"]
        largest, _ = make.draw_rows(
            self._logits, (nothing, nothing, nothing), self._best, self._drawn, num_rows
        )
        kernel = make.kernel(likeliest.find_likeliest, _TYPES, constants, 4, 1)
        return (
            largest,
            bind_weigh(
                make, self._logits, staging["weighed_temperatures"], self._best[0], self._weighed,
                num_rows,
            ),
            kernel.bind(
                (num_rows,), self._logits, staging["num_tops"], *self._best,
                self._weighed["weights"], slices, records, records, records,
            ),
        )  # fmt: skip

    def bind_take(self, make: Launches, num_rows: int) -> Bound:
        """Return the launch of `take_drawn`."""
        constants = {"VOCABULARY": make.spec.vocab_size}
        kernel = make.kernel(likeliest.take_drawn, _TYPES, constants, 1, 1)
        return kernel.bind(
            (num_rows,), self._logits, self._staging["num_tops"], self._drawn,
            self._memory["records"],
        )  # fmt: skip

    def bind_all(self, make: Launches) -> None:
        """Ask for every kernel."""
        self.bind_find(make, 1)
        self.bind_take(make, 1)

    def close(self) -> None:
        """Free all memory."""
        self._pinned.close()
        self._memory.close()
