"""What executes planned steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.runner_contract import OnLayer, OnQueued, RunnerResult
from engine.core.step.step_batch import StepBatch


class Runner(Protocol):
    """Executes planned steps. One thread at a time uses it.

    Its only state is the KV cache and the blocks swapped out of it.
    """

    def execute(
        self,
        batch: StepBatch,
        on_layer: OnLayer | None = None,
        on_queued: OnQueued | None = None,
    ) -> RunnerResult:
        """Run one step; return one entry per sequence, in order, None where `sample` is None.

        A sequence's tokens depend on its own tokens and cache alone, never on its neighbours nor on
        its drafts. Raises `SequencesFailed` when only some sequences have a result.

        `on_layer` is called once for each layer, in order from 0, as soon as the keys and values of
        all of the step's tokens in that layer can be sent: nothing writes them any more. A drafting
        layer inside the runner (mtp) comes last, after the draw. `on_layer` is also called for all
        layers before `SequencesFailed`; after any other error some calls may be missing.

        `on_queued` is called at most once, when the rest of the step needs little of the
        interpreter: on a device, when most of its work is queued there. Before that another thread
        that computes in Python would delay the step.

        A runner that can go on may begin the step after this one, see `StepBatch`. Its tokens are
        those that it would draw in a step of its own.
        """

    def swap_out(self, block_ids: Sequence[int], host_block_ids: Sequence[int]) -> None:
        """Copy whole blocks, all layers, into the host pool, pairwise."""

    def swap_in(self, host_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy whole blocks, all layers, back from the host pool, pairwise."""
