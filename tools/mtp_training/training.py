"""The training loop, its checkpoints and its measure: how many drafts the target would accept."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from engine.runner.paddle_import import paddle
from tools.mtp_training.batches import DRAFTS, make_batch, plan_batches
from tools.mtp_training.drafting import Drafter
from tools.mtp_training.mtp_layer import MtpLayer
from tools.mtp_training.work_folder import Conversation, WorkFolder, write_whole

_PEAK_RATE, _LAST_RATE_SHARE = 5e-4, 0.02
_WARM_UP_STEPS = 60
_WEIGHT_DECAY, _BETA2, _MAX_NORM = 0.01, 0.95, 1.0
_RECURSION_SHARE = 0.2
_HELD_OUT_AT_ONCE = 6
_CHECKPOINT = "training.pdparams"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The length of a run, its random draws, and how often it is measured and saved."""

    num_steps: int
    seed: int
    steps_per_evaluation: int = 100


def learning_rate(step: int, num_steps: int) -> float:
    """Return the rate: a linear start, then half a cosine down to a small rest."""
    if step < _WARM_UP_STEPS:
        return _PEAK_RATE * (step + 1) / _WARM_UP_STEPS
    progress = (step - _WARM_UP_STEPS) / max(1, num_steps - _WARM_UP_STEPS)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return _PEAK_RATE * (_LAST_RATE_SHARE + (1 - _LAST_RATE_SHARE) * share)


class Training:
    """One run: its layer, optimizer, log and step, taken from the work folder if it has them."""

    def __init__(
        self, work: WorkFolder, layer: MtpLayer, drafter: Drafter, plan: TrainingPlan
    ) -> None:
        """Load or begin a run; it may continue with another number of steps, at the new rate."""
        self._work, self._layer, self._drafter, self._plan = work, layer, drafter, plan
        self._optimizer = paddle.optimizer.AdamW(
            _PEAK_RATE,
            beta2=_BETA2,
            parameters=layer.parameters(),
            weight_decay=_WEIGHT_DECAY,
            grad_clip=paddle.nn.ClipGradByGlobalNorm(_MAX_NORM),
        )
        self.step = 0
        self.log: list[dict[str, Any]] = []
        self._resume()

    def run(
        self,
        train: Sequence[Conversation],
        held_out: Sequence[Conversation],
        save_weights: Callable[[], object],
    ) -> None:
        """Train to the plan's last step; each evaluation logs, saves weights and a checkpoint."""
        plan = self._plan
        lengths = [len(c.token_ids) - c.prompt_len for c in train]
        batches = itertools.islice(plan_batches(lengths, plan.seed), self.step, plan.num_steps)
        losses: list[float] = []
        with tqdm(total=plan.num_steps, initial=self.step, desc="training", unit="step") as bar:
            for indices in batches:
                losses.append(self._one_step([train[i] for i in indices]))
                self.step += 1
                bar.update()
                bar.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}", refresh=False)
                if self.step % plan.steps_per_evaluation and self.step < plan.num_steps:
                    continue
                rates = acceptance(self._drafter, held_out)
                self.log.append(
                    {"step": self.step, "loss": float(np.mean(losses)), "acceptance": rates}
                )
                losses = []
                shown = ", ".join(f"{rate:.3f}" for rate in rates)
                bar.write(f"step {self.step}: loss {self.log[-1]['loss']:.3f}, accepted {shown}")
                self._save()
                save_weights()

    def _one_step(self, conversations: list[Conversation]) -> float:
        draw = np.random.default_rng((self._plan.seed, self.step, 1))
        loss = self._drafter.loss(make_batch(conversations, _RECURSION_SHARE, draw), draw)
        loss.backward()
        self._optimizer.set_lr(learning_rate(self.step, self._plan.num_steps))
        with paddle.utils.unique_name.guard():  # its state's names are the same in every run
            self._optimizer.step()
        self._optimizer.clear_grad()
        return float(loss)

    def _save(self) -> None:
        state = {
            "weights": self._layer.weights,
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "log": self.log,
        }
        write_whole(self._work.path / _CHECKPOINT, lambda path: paddle.save(state, str(path)))
        self._work.write_json("log.json", self.log)

    def _resume(self) -> None:
        path = self._work.path / _CHECKPOINT
        if not path.exists():
            return
        state = paddle.load(str(path))
        for name, parameter in self._layer.weights.items():
            parameter.set_value(state["weights"][name])
        self._optimizer.set_state_dict(state["optimizer"])
        self.step, self.log = state["step"], state["log"]


def acceptance(drafter: Drafter, held_out: Sequence[Conversation]) -> list[float]:
    """Return how often draft n is right if those before it are, for n = 1 … DRAFTS."""
    right, tried = np.zeros(DRAFTS), np.zeros(DRAFTS)
    by_length = sorted(held_out, key=lambda c: len(c.token_ids))
    draw = np.random.default_rng(0)  # unused: every position is taken
    for first in range(0, len(by_length), _HELD_OUT_AT_ONCE):
        batch = make_batch(by_length[first : first + _HELD_OUT_AT_ONCE], 1.0, draw)
        outcome = drafter.accepted(batch)
        still_right = np.ones(outcome.shape[:2], bool)
        for number in range(DRAFTS):
            counted = still_right & (outcome[..., number] >= 0)
            still_right = counted & (outcome[..., number] == 1)
            tried[number] += counted.sum()
            right[number] += still_right.sum()
    return [float(rate) for rate in right / np.maximum(1, tried)]
