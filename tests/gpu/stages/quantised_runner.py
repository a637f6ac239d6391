"""A node's runner with quantised weights: the same bits through real steps, and their times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.gpu.stages.model import CONTEXT, Checks, Findings
from tests.gpu.stages.runner import BLOCK_SIZE, LARGE, SMALL, loaded, median_ms

if TYPE_CHECKING:
    from engine.runner.model_runner import ModelRunner

_QUANTISATIONS = ("q4_0", "q8_0")


def runner_quantised(card: Any, found: Findings) -> None:
    """Weights in Q4_0 and Q8_0, quantised while they are loaded, on a small and on an 8B model."""
    if not card.is_real:
        return
    checks = Checks()
    for name in _QUANTISATIONS:
        with checks.check(name):
            _check_bits(loaded(SMALL, 2048, name), name)
            print(f"{name}: equal bits however rows are computed", flush=True)
    for name in _QUANTISATIONS:
        begun = time.monotonic()
        runner = loaded(LARGE, 4096, name)
        result: dict[str, Any] = {"load_s": round(time.monotonic() - begun, 1)}
        found[f"runner_{name}"] = result
        _time_steps(runner, result)
        print(name, result, flush=True)
    checks.end()


def _check_bits(runner: ModelRunner, quantization: str) -> None:
    """Compare chunks cut anywhere, decoded rows, and rows among others."""
    from tests.support.models.running import logits_of, scheduled

    prompt = np.random.default_rng(3).integers(0, 4000, 700).tolist()
    table = list(range(20, 31))
    results = []
    for cuts in ([], [1], [64, 364], list(range(690, 700)), [256, 257, 699]):
        start = 0
        for end in (*cuts, len(prompt)):
            [last] = logits_of(runner, scheduled(prompt[start:end], start, table))
            start = end
        results.append(last)
    mine = scheduled(prompt[699:], 699, table)
    for count in (1, 3, 8, 17, 40):
        others = [scheduled(prompt[:1], 0, [40 + place]) for place in range(count)]
        results.append(logits_of(runner, *others, mine)[count])
    longer = [scheduled(prompt[:60], 0, [40]), scheduled(prompt[:7], 0, [41])]
    results.append(logits_of(runner, longer[0], mine, longer[1])[1])
    assert np.isfinite(results[0]).all()
    differing = [at for at, one in enumerate(results) if not np.array_equal(one, results[0])]
    assert not differing, f"{quantization}: {differing} of {len(results)} differ"


def _time_steps(runner: ModelRunner, result: dict[str, Any]) -> None:
    """Time steps and prompts of an 8B model from the host's batch to the host's tokens."""
    from common.request import SamplingParams
    from engine.core.runner_contract import SampleInput, ScheduledSequence
    from engine.core.step.step_batch import batch_of
    from engine.runner.gpu.decoder import GpuDecoder

    decoder = runner.decoder
    assert isinstance(decoder, GpuDecoder)
    weights = decoder.launches.weights
    result["weights_gb"] = round(sum(one.num_bytes for one in weights.memories) / 1e9, 2)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    history = [7] * 4096
    blocks = CONTEXT // BLOCK_SIZE + 1
    for count in (1, 8, 32, 128):
        sequences = [
            ScheduledSequence(
                0, [5], CONTEXT - 1, range(place * blocks, (place + 1) * blocks),
                SampleInput(greedy, 0, history[:CONTEXT], []),
            )
            for place in range(count)
        ]  # fmt: skip
        result[f"step_{count}_ms"] = median_ms(runner, batch_of(sequences), 20)
    for length in (512, 4096):
        sample = SampleInput(greedy, 0, history[:length], [])
        chunk = ScheduledSequence(0, history[:length], 0, range(length // BLOCK_SIZE), sample)
        result[f"prefill_{length}_ms"] = median_ms(runner, [chunk], 5)
