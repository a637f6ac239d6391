"""What a step copies to a device and reads back: nothing per layer, and one read per step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.model_runner import ModelRunner
from tests.support.engine.counting_device import CountingDevice
from tests.support.engine.mirrored_cache import mirrored_caches
from tests.support.models.running import load, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

NUM_LAYERS = 4
PROMPTS = [prompt_of(length, length) for length in (40, 70, 33, 90)]
TABLES = [[0, 1, 2, 3], range(10, 16), range(20, 23), range(30, 36)]


class Counted:
    """A runner on a mirrored cache whose traffic is counted, also for each layer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with mirrored_caches():
            self.runner: ModelRunner = load(folder, attention_backend="paddle")
        self.device = CountingDevice()
        self.device.install(monkeypatch)
        self.in_layers = 0
        run_layer = self.runner.decoder.run_layer

        def counted(index: int, hidden: Any) -> None:
            before = len(self.device.copies_in) + len(self.device.reads)
            run_layer(index, hidden)
            self.in_layers += len(self.device.copies_in) + len(self.device.reads) - before

        monkeypatch.setattr(self.runner.decoder, "run_layer", counted)

    def execute(self, batch: Sequence[ScheduledSequence]) -> None:
        self.device.clear()
        self.in_layers = 0
        self.runner.execute(batch_of(batch))


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3"] | {"num_hidden_layers": NUM_LAYERS})
    one = Counted(folder, monkeypatch)
    for prompt, table in zip(PROMPTS, TABLES, strict=True):
        one.runner.execute(batch_of([scheduled(prompt[:-8], 0, table, is_sampled=False)]))
    return one


def step(*counts: int) -> list[ScheduledSequence]:
    """The next tokens of each sequence."""
    return [
        scheduled(prompt[len(prompt) - 8 :][:count], len(prompt) - 8, table)
        for prompt, table, count in zip(PROMPTS, TABLES, counts, strict=False)
    ]


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1, 1), (1, 5, 1, 8)])
def test_a_decode_step_reads_once_and_copies_nothing_per_layer(
    counted: Counted, counts: tuple[int, ...]
) -> None:
    counted.execute(step(*counts))
    assert counted.in_layers == 0
    assert len(counted.device.reads) == 1
    assert len(counted.device.copies_in) <= 6


def test_chunks_beside_decoding_copy_nothing_per_layer(counted: Counted) -> None:
    chunk = scheduled(prompt_of(60), 0, range(40, 44))
    counted.execute([*step(1, 5, 1, 1), chunk])
    assert counted.in_layers == 0
    assert len(counted.device.reads) == 1
    assert len(counted.device.copies_in) <= 8


def test_what_is_copied_does_not_grow_with_the_context(counted: Counted) -> None:
    """Tables and positions of single rows: a few numbers per block, and none per key and row."""
    counted.execute(step(1, 1, 1, 1))
    assert sum(counted.device.copies_in) < 12_000
