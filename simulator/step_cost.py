"""The time of one step on a virtual clock: a roofline model with six numbers.

    step_s = overhead_s
           + max(weights_s, token_s * tokens)              matrix products: memory- or compute-bound
           + context_s * sum of context over decodes       their KV is read once
           + pair_s * sum of chunk * mean context          attention of prefill chunks
           + block_copy_s * blocks swapped in or out

The defaults stand for an 8B model with grouped heads (16-bit weights, 128 KiB of KV per token) on a
GPU with 80 GB at 1.6 TB/s that reaches 190 TFLOP/s in matrix products: 16 GB / 1.6 TB/s per pass
over the weights, 16 GFLOP per token, 128 KiB / 1.6 TB/s per token of context, 0.5 MFLOP per pair of
a token and one that it attends to, 8 MiB / 25 GB/s per block of 64 tokens copied from or to the
host. They are rounded on purpose: ratios between policies matter here, not the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from common.errors import ConfigError
from engine.core.step.step_batch import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds: per step, per pass over the weights, per token, per token of context, and so on."""

    overhead_s: float = 2e-3
    weights_s: float = 10e-3
    token_s: float = 85e-6
    context_s: float = 80e-9
    pair_s: float = 3e-9
    block_copy_s: float = 340e-6

    @property
    def pairs_per_token(self) -> int:
        """Pairs of attention that cost as much as the matrix products of one token; 0: none do."""
        return round(self.token_s / self.pair_s) if self.pair_s else 0

    def step_s(self, batch: StepBatch, num_copied_blocks: int = 0) -> float:
        """Return the seconds of a step that runs `batch` and copies blocks from or to the host."""
        counts, starts = batch.num_tokens, batch.starts
        num_tokens, is_one = int(counts.sum()), counts == 1
        context = int((starts[is_one] + 1).sum())
        pairs = int((counts * (2 * starts + counts + 1) // 2)[~is_one].sum())
        return self.seconds(num_tokens, context, pairs, num_copied_blocks)

    def seconds(
        self, num_tokens: int, context: int, pairs: int = 0, num_copied_blocks: int = 0
    ) -> float:
        """Return the seconds of a step, by what it computes, reads and copies."""
        return (
            self.overhead_s
            + max(self.weights_s, self.token_s * num_tokens)
            + self.context_s * context
            + self.pair_s * pairs
            + self.block_copy_s * num_copied_blocks
        )

    def ends_of_decodes(
        self, began_s: float, count: int, context: int, num_steps: int
    ) -> list[float]:
        """Return the end of each of `num_steps` steps of `count` decodes, one after the other.

        They attend to `context` tokens in the first step, and to `count` more in each further one.
        """
        same_s, ends_s = self.seconds(count, 0), list[float]()
        for now_context in range(context, context + count * num_steps, count):
            began_s += same_s + self.context_s * now_context
            ends_s.append(began_s)
        return ends_s

    def with_settings(self, settings: Sequence[str]) -> StepCost:
        """Return a cost with some numbers replaced: `settings` are `NAME=SECONDS`.

        Raises `ConfigError` for an unknown name or a number that is no time.
        """
        known = {f.name for f in fields(self)}
        changed: dict[str, float] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in known:
                raise ConfigError(f"cost {setting!r}: wanted one of {', '.join(sorted(known))}")
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if not 0 <= value < 3600:
                raise ConfigError(f"cost {setting!r}: wanted {name}=SECONDS, 0 or more")
            changed[name] = value
        return replace(self, **changed)
