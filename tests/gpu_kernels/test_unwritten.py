"""Steps have the same bits whatever memory held before, and in whatever order programs run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from engine.runner.gpu.kernels.experts import grouped_products, listing
from engine.runner.model_runner import ModelRunner
from tests.gpu_kernels.checked_launch import programs_in
from tests.gpu_kernels.planted import plant
from tests.gpu_kernels.stepped_node import (
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

NAN, LARGE = 0xFF, 0x7F
"""Bytes: NaN and -1 in every type, and 3e38 and 2,139,062,143."""
WAYS: list[tuple[int, str | int]] = [(NAN, "reversed"), (LARGE, 7)]
OTHERS = [[6, 7, 8], [10, 11, 12], [13, 14, 15]]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2 in int8": (FAMILIES["qwen2"] | {"head_dim": 32}, {"kv_cache_dtype": "int8"}),
    "groups of 3": (
        CONFIGS["qwen3"] | {"hidden_size": 96, "num_attention_heads": 6, "vocab_size": 131}, {},
    ),
    "ernie in Q4_0": (CONFIGS["ernie"] | WIDE, {"quantization": "q4_0"}),
    "qwen3 with a window": (CONFIGS["qwen3_mixed"] | {"layer_types": ["sliding_attention"]}, {}),
    "qwen3 in Q8_0": (CONFIGS["qwen3"] | WIDE, {"quantization": "q8_0"}),
    "qwen3 with experts": (CONFIGS["qwen3_moe"], {}),
    "ernie with experts": (CONFIGS["ernie_moe"] | {"moe_layer_start_index": 0}, {}),
}  # fmt: skip
"""Families of tiny checkpoints, and how they are stored."""

SOME = TokenRules(allowed_token_ids=(3, 31, 32, 77), biases=((31, 2.0),))
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=4, top_p=0.9, seed=4),
    SamplingParams(max_tokens=9, temperature=1.0, repetition_penalty=1.2, seed=5, rules=SOME),
]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    config, engine = MODELS[request.param]
    return write_checkpoint(tmp_path, config | {"num_hidden_layers": 1}), engine


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


def rows_of_kinds(runner: ModelRunner) -> list[Any]:
    """Return the logits of rows of every kind.

    Chunks that end within a block, a single row beside a chunk, and drafts of any number in a graph
    for more sequences.
    """
    others = [scheduled(prompt_of(count, count), 0, table)
              for count, table in zip((1, 7), OTHERS, strict=False)]  # fmt: skip
    found: list[Any] = [logits_of(runner, scheduled(PROMPT[:17], 0, TABLE), *others)]
    row = scheduled([9], 7, OTHERS[1])
    found.append(logits_of(runner, row, scheduled(PROMPT[17:35], 17, TABLE)))
    drafts = [drafted([5], 8, OTHERS[1]), drafted(PROMPT[35:39], 35, TABLE),
              drafted([8, 9, 4], 1, OTHERS[0])]  # fmt: skip
    return [*found, logits_of(runner, *drafts)]


def single_rows(runner: ModelRunner) -> list[Any]:
    """Return the logits of three rows behind chunks, in a graph for four."""
    tables = [TABLE, *OTHERS[:2]]
    chunks = [scheduled(prompt_of(count, count), 0, table)
              for count, table in zip((5, 1, 17), tables, strict=True)]  # fmt: skip
    rows = [scheduled([3], count, table) for count, table in zip((5, 1, 17), tables, strict=True)]
    return [logits_of(runner, *chunks), logits_of(runner, *rows)]


def draws(runner: ModelRunner) -> list[Any]:
    """Return what rows of every kind draw, in a graph and behind it, and beside a chunk."""
    runner.execute(batch_of([scheduled(PROMPT[:39], 0, TABLE, is_sampled=False)]))
    rows = [
        ScheduledSequence(0, PROMPT[39:], 39, TABLE, SampleInput(one, 0, PROMPT, []))
        for one in PARAMS
    ]
    beside = [*rows, scheduled(prompt_of(5, 4), 0, OTHERS[2])]
    drafts = [drafted(PROMPT[36:40], 36, TABLE), drafted([4], 4, OTHERS[2])]
    return [runner.execute(batch_of(batch)) for batch in (rows, beside, drafts)]


def require_equal(found: Any, expected: Any) -> None:
    """Compare to the last bit."""
    if isinstance(expected, np.ndarray):
        assert np.isfinite(expected).all()
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    else:
        assert found == expected


def results(
    model: tuple[Path, dict[str, Any]], compute: Callable[[ModelRunner], list[Any]]
) -> list[Any]:
    """Return what is computed in each of `WAYS`."""
    found = []
    folder, engine = model
    for byte, order in WAYS:
        with pytest.MonkeyPatch.context() as patch, programs_in(order):
            found.append(compute(runner_that_holds(byte, folder, patch, **engine)))
    return found


@pytest.mark.timeout(600)
def test_what_memory_held_decides_nothing(model: tuple[Path, dict[str, Any]]) -> None:
    found, expected = results(model, rows_of_kinds)
    require_equal(found, expected)


@pytest.mark.timeout(600)
def test_nor_does_it_where_rows_are_drawn(one_layer: Path) -> None:
    found, expected = results((one_layer, {}), draws)
    require_equal(found, expected)


def go_on(runner: ModelRunner) -> list[Any]:
    """Return what a node draws that goes on, up to the last token that a sequence may have."""
    node = Node(with_grammars(runner), goes_on=True)
    node.add(60, 4, 1, **GREEDY, logprobs=1)
    node.add(5, 4, 2, **FILTERED)
    node.add(9, 4, 3, **UNDER_GRAMMAR | PENALISED)
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    assert node.num_begun >= 2
    return [*node.outputs.values(), *node.logprobs.values()]


@pytest.mark.timeout(600)
def test_nor_does_it_where_steps_go_on(one_layer: Path) -> None:
    """Also at a sequence's last position, beyond which there are no angles and no blocks."""
    found, expected = results((one_layer, {}), go_on)
    assert found == expected
    assert all(found[:3])


FAULTS = [
    # Slots behind a sequence's end, in blocks that others have left.
    (attention, "is_slot = is_block & (position <= last)", "is_slot = is_block & (position >= 0)"),
    # Entries of a table behind a sequence's last block.
    (attention, "is_block = place * BLOCK <= last_own", "is_block = place >= 0"),
    # Columns behind a row's last one.
    (rows, "values = tl.load(hidden + row * N + columns, mask=inside, other=0.0).to(tl.float32)",
     "values = tl.load(hidden + row * N + columns, mask=inside).to(tl.float32)"),
]  # fmt: skip
OF_EXPERTS = [
    # Tiles of pairs behind a step's last one.
    (grouped_products, """    if tile < tl.load(num_tiles):
        expert, places, is_pair, pair = pairs_of(tiles, pairs, tile, BM)
        sources = sources_of(outputs, N, BN).to(tl.int64)
        x_rows = x + (pair""", """    if tile >= 0 * tl.load(num_tiles):
        expert, places, is_pair, pair = pairs_of(tiles, pairs, tile, BM)
        sources = sources_of(outputs, N, BN).to(tl.int64)
        x_rows = x + (pair"""),
    # Pairs behind a step's last one.
    (listing, "mask=places < num_pairs, other=EXPERTS", "mask=places >= 0, other=EXPERTS"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new"), [*FAULTS, *OF_EXPERTS])
def test_what_is_read_and_was_not_written_is_found(
    module: ModuleType, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other bits, or as an address that is computed from them."""
    is_of_experts = (module, old, new) in OF_EXPERTS
    config, _ = MODELS["qwen3 with experts" if is_of_experts else "groups of 3"]
    folder = write_checkpoint(tmp_path, config | {"num_hidden_layers": 1})
    plant(monkeypatch, tmp_path, module, old, new)
    try:
        found, expected = results((folder, {}), single_rows)
    except InterpreterError:
        return
    with pytest.raises(AssertionError):
        require_equal(found, expected)
