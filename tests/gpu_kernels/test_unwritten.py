"""Steps have the same bits whatever memory held before, and in whatever order programs run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import FAMILIES, PROMPT, TABLE, on_card  # isort: skip

import numpy as np
import pytest
from triton.runtime.errors import InterpreterError

from common.request import SamplingParams
from common.token_rules import TokenRules
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.gpu.kernels import attention, rows
from engine.runner.model_runner import ModelRunner
from tests.gpu_kernels.checked_launch import programs_in
from tests.gpu_kernels.planted import plant
from tests.gpu_kernels.stepped_node import (
    DRAWN,
    FILTERED,
    GREEDY,
    PENALISED,
    UNDER_GRAMMAR,
    Node,
    with_grammars,
)
from tests.gpu_kernels.unwritten import leave, leave_in_blocks
from tests.support.models.running import logits_of, scheduled
from tests.support.models.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

NAN, LARGE, ZERO = 0xFF, 0x7F, 0x00
"""Bytes: NaN and -1, 3e38 and 2,139,062,143, or 0 in every type."""
WAYS: list[tuple[int, str | int]] = [(NAN, "reversed"), (LARGE, 7)]
OTHERS = [[6, 7, 8], [10, 11, 12], [13, 14, 15]]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (FAMILIES["llama"], {}),
    "qwen2 in int8": (FAMILIES["qwen2"] | {"head_dim": 32}, {"kv_cache_dtype": "int8"}),
    "groups of 3": (
        CONFIGS["qwen3"] | {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 131}, {},
    ),
    "ernie in Q4_0": (CONFIGS["ernie"] | WIDE, {"quantization": "q4_0"}),
    "qwen3 in Q8_0": (CONFIGS["qwen3"] | WIDE, {"quantization": "q8_0"}),
}  # fmt: skip
"""Families of tiny checkpoints with what else differs, all with one layer but for the first."""

SOME = TokenRules(allowed_token_ids=(3, 31, 32, 77), biases=((31, 2.0),))
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=4, top_p=0.9, seed=4),
    SamplingParams(max_tokens=9, temperature=1.0, repetition_penalty=1.2, seed=5, rules=SOME),
]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    config, engine = MODELS[request.param]
    layers = {"num_hidden_layers": 2 if request.param == "llama" else 1}
    return write_checkpoint(tmp_path, config | layers), engine


def runner_that_holds(byte: int, folder: Path, patch: pytest.MonkeyPatch, **engine: Any) -> Any:
    """Return a runner that drafts; memory has `byte` where nobody has written."""
    leave(patch, byte)
    runner = on_card(folder, num_drafts=3, **engine)
    leave_in_blocks(runner, byte)
    return runner


def drafted(tokens: Sequence[int], start: int, table: Sequence[int]) -> ScheduledSequence:
    """A sequence's last token, and drafts behind it."""
    sample = SampleInput(replace(PARAMS[0], logprobs=None), 0, list(PROMPT[: start + 1]), [])
    return ScheduledSequence(0, tokens, start, table, sample, num_drafts=len(tokens) - 1)


def computed(runner: ModelRunner) -> list[Any]:
    """Return logits, tokens and log probabilities of steps of every kind.

    Chunks that end within a block, single rows beside a chunk, three rows in a graph for four,
    drafts of any number in a graph and beside a chunk, and draws of every kind.
    """
    found: list[Any] = [logits_of(runner, scheduled(PROMPT[:17], 0, TABLE))]
    others = [scheduled(prompt_of(count, count), 0, table, is_sampled=False)
              for count, table in zip((1, 7), OTHERS, strict=False)]  # fmt: skip
    runner.execute(batch_of([scheduled(PROMPT[17:39], 17, TABLE, is_sampled=False), *others]))
    row = scheduled(PROMPT[39:40], 39, TABLE)
    found.append(logits_of(runner, row, scheduled(prompt_of(33, 4), 0, OTHERS[2])))
    found.append(logits_of(runner, scheduled([5], 7, OTHERS[1]), row, scheduled([4], 1, OTHERS[0])))
    drafts = [drafted([5], 7, OTHERS[1]), drafted(PROMPT[36:40], 36, TABLE),
              drafted([8, 9, 4], 1, OTHERS[0])]  # fmt: skip
    found.append(logits_of(runner, *drafts))
    found.append(runner.execute(batch_of(drafts)))
    found.append(runner.execute(batch_of([*drafts, scheduled(prompt_of(18, 4), 0, OTHERS[2])])))
    found.append(
        runner.execute(
            batch_of([
                ScheduledSequence(0, PROMPT[39:], 39, TABLE, SampleInput(one, 0, PROMPT, []))
                for one in PARAMS
            ])
        )
    )  # fmt: skip
    return found


def require_equal(found: Any, expected: Any) -> None:
    """Compare to the last bit."""
    if isinstance(expected, np.ndarray):
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    else:
        assert list(found) == list(expected)


def results(model: tuple[Path, dict[str, Any]], compute: Any = computed) -> list[Any]:
    """Return what is computed in each of `WAYS`."""
    found = []
    folder, engine = model
    for byte, order in WAYS:
        with pytest.MonkeyPatch.context() as patch, programs_in(order):
            found.append(compute(runner_that_holds(byte, folder, patch, **engine)))
    return found


@pytest.mark.timeout(600)
def test_what_memory_held_decides_nothing(model: tuple[Path, dict[str, Any]]) -> None:
    found, expected = results(model)
    require_equal(found, expected)


def go_on(runner: ModelRunner) -> list[Any]:
    """Return what a node draws that goes on, up to the last token that a sequence may have."""
    node = Node(with_grammars(runner), goes_on=True)
    node.add(57, 7, 1, **GREEDY, logprobs=1)
    node.add(5, 6, 2, **DRAWN)
    node.add(17, 5, 3, **FILTERED, logprobs=2)
    node.add(9, 5, 4, **UNDER_GRAMMAR | PENALISED)
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    assert node.num_begun >= 2
    return [*node.outputs.values(), *node.logprobs.values()]


@pytest.mark.timeout(600)
def test_nor_does_it_where_steps_go_on(one_layer: Path) -> None:
    """Also at a sequence's last position, beyond which there are no angles and no blocks."""
    found, expected = results((one_layer, {}), go_on)
    assert found == expected
    assert all(found[:4])


FAULTS = [
    # Slots behind a sequence's end, in blocks that others have left.
    (attention, "is_slot = is_block & (position <= last)", "is_slot = is_block & (position >= 0)"),
    # Entries of a table behind a sequence's last block.
    (attention, "is_block = place * BLOCK <= last_own", "is_block = place >= 0"),
    # What padding wrote, or left, in the memory of the pieces.
    (attention, "for piece in range(own // PIECE + 1):\n            item",
     "for piece in range(own // PIECE + 2):\n            item"),
    # Columns behind a row's last one.
    (rows, "values = tl.load(hidden + row * N + columns, mask=inside, other=0.0).to(tl.float32)",
     "values = tl.load(hidden + row * N + columns, mask=inside).to(tl.float32)"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new"), FAULTS)
def test_what_is_read_and_was_not_written_is_found(
    module: ModuleType, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other bits, or as an address that is computed from them."""
    folder = write_checkpoint(tmp_path, MODELS["groups of 3"][0] | {"num_hidden_layers": 1})
    plant(monkeypatch, tmp_path, module, old, new)
    try:
        found, expected = results((folder, {}))
    except InterpreterError:
        return
    with pytest.raises(AssertionError):
        require_equal(found, expected)
