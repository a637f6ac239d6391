"""Fused attention with operators that a CPU plays: what they are given, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.runner.model_runner import ModelRunner
from engine.runner.paddle.fused_check import flash_problem, paged_problem
from engine.runner.paddle_import import paddle
from engine.runner.start import assemble
from engine.runner.weights.model_spec import DecoderSpec, read_decoder_spec
from tests.fakes import fused_operators
from tests.fakes.fused_operators import flash_operator, paged_operator
from tests.unit.runner.running import load, logits_of, scheduled
from tests.unit.runner.tiny_checkpoints import CONFIGS, prompt_of, write_checkpoint

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fused"), CONFIGS["qwen3"])


@pytest.fixture
def spec(folder: Path) -> DecoderSpec:
    return read_decoder_spec(folder)


def fused_runner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, has_flash: bool = True
) -> ModelRunner:
    monkeypatch.setattr(assemble, "_choose_backend", lambda *_: "fused")
    flash = flash_operator if has_flash else refused
    fused_operators.install(monkeypatch, flash=flash)
    return load(folder, block_size=BLOCK_SIZE)


def refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("compiled without flash attention")


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_right_operators_pass_the_check(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    fused_operators.install(monkeypatch)
    assert paged_problem(spec, "float32", block_size) == ""
    assert flash_problem(spec, "float32", block_size) == ""


def test_operators_that_are_missing_are_refused(spec: DecoderSpec) -> None:
    """As on this CPU, for which neither is compiled."""
    assert paged_problem(spec, "float32", 16).startswith("the paged operator fails: ")
    assert flash_problem(spec, "float32", 16).startswith("the flash operator fails: ")


def with_tables(change: Callable[[np.ndarray], object]) -> Callable[..., Any]:
    """The paged operator with other block tables than it was given."""

    def changed(*tensors: paddle.Tensor, **rest: Any) -> Any:
        tables = tensors[10].numpy().copy()
        change(tables)
        replaced = [*tensors[:10], paddle.to_tensor(tables)]
        return paged_operator(*replaced, **rest)

    return changed


def set_all(tables: np.ndarray, first: int, source: int) -> None:
    tables[:, first:] = tables[:, source : source + 1]


def shorter(*tensors: paddle.Tensor, **rest: Any) -> Any:
    """Read no key behind the first block."""
    changed = list(tensors)
    size = rest["block_size"]
    changed[4] = paddle.clip(tensors[4], max=size - 1)
    rest["max_dec_len_this_time"] = changed[4].max().reshape([1])
    return paged_operator(*changed, **rest)


def overwriting(*tensors: paddle.Tensor, **rest: Any) -> Any:
    """Right results, but a key of another block is lost."""
    out = paged_operator(*tensors, **rest)
    fused_operators.raw(tensors[1])[-1, 0, 0, 0] = 7
    return out


@pytest.mark.parametrize(
    "paged",
    [
        shorter,
        overwriting,
        with_tables(lambda tables: set_all(tables, 1, 0)),
        with_tables(lambda tables: set_all(tables, 2, 1)),
        with_tables(lambda tables: set_all(tables, 3, 2)),
        with_tables(lambda tables: tables.sort(axis=1)),
    ],
    ids=["first block", "overwriting", "table 0", "table 1", "table 2", "sorted"],
)
def test_paged_operators_that_read_other_blocks_are_refused(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch, paged: Callable[..., Any]
) -> None:
    fused_operators.install(monkeypatch, paged=paged)
    assert "off by" in paged_problem(spec, "float32", BLOCK_SIZE)


def causal_from_the_start(
    query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor,
    row_ends: paddle.Tensor, key_ends: paddle.Tensor, *rest: Any, **more: Any,
) -> Any:  # fmt: skip
    """As flash attention before its version 2.1: row j sees keys 0 to j."""
    out, _ = flash_operator(query, key, value, row_ends, key_ends, *rest, **more)
    rows, keys = row_ends.numpy(), key_ends.numpy()
    for index in range(len(rows) - 1):
        count, first = rows[index + 1] - rows[index], keys[index]
        past = slice(first, first + count)
        found = fused_operators.attend(
            *(query.numpy()[rows[index] : rows[index + 1]], key.numpy()[past], value.numpy()[past])
        )
        out[rows[index] : rows[index + 1]] = paddle.to_tensor(found)
    return out, None


def test_flash_attention_with_another_mask_is_refused(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_operators.install(monkeypatch, flash=causal_from_the_start)
    assert "the flash operator is off by" in flash_problem(spec, "float32", BLOCK_SIZE)


@pytest.mark.parametrize("has_flash", [True, False])
def test_logits_of_a_mixed_batch_are_those_of_plain_operators(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_flash: bool
) -> None:
    plain = load(folder, attention_backend="paddle", block_size=BLOCK_SIZE)
    fused = fused_runner(folder, monkeypatch, has_flash=has_flash)
    assert fused.layout.model_digest != plain.layout.model_digest
    prompts = [prompt_of(100, 1), prompt_of(70, 2), prompt_of(90, 3), prompt_of(40, 4), [5]]
    first = [range(7), range(20, 25), range(10, 16), range(30, 33), [40]]
    cached = [99, 20, 0, 35, 0]
    results = []
    for runner in (plain, fused):
        for prompt, table, count in zip(prompts, first, cached, strict=True):
            if count:
                logits_of(runner, scheduled(prompt[:count], 0, table))
        batch = [
            scheduled(prompt[count:], count, table)
            for prompt, table, count in zip(prompts, first, cached, strict=True)
        ]
        results.append(logits_of(runner, *batch))
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_verify_rows_take_the_paged_operator_and_one_call_per_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = fused_runner(folder, monkeypatch)
    prompts = [prompt_of(60, 1), prompt_of(45, 2)]
    for prompt, table in zip(prompts, ([0, 1, 2, 3], [4, 5, 6]), strict=True):
        logits_of(runner, scheduled(prompt[:40], 0, table))
    calls: list[int] = []

    def counted(qkv: paddle.Tensor, *rest: Any, **more: Any) -> Any:
        calls.append(qkv.shape[0])
        return paged_operator(qkv, *rest, **more)

    fused_operators.install(monkeypatch, paged=counted, flash=refused)
    verify = [
        scheduled(prompts[0][40:45], 40, [0, 1, 2, 3]), scheduled(prompts[1][40:41], 40, [4, 5, 6])
    ]  # fmt: skip
    logits_of(runner, *verify)
    assert calls == [6] * runner.layout.num_layers


def test_many_chunks_gather_the_keys_of_few_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.runner.paddle import fused_attention

    runner = fused_runner(folder, monkeypatch)
    prompts = [prompt_of(20 + 5 * i, i) for i in range(6)]
    batch = [scheduled(prompt, 0, range(4 * i, 4 * i + 4)) for i, prompt in enumerate(prompts)]
    together = logits_of(runner, *batch)
    gathered: list[int] = []

    def counted(query: paddle.Tensor, key: paddle.Tensor, *rest: Any, **more: Any) -> Any:
        gathered.append(key.size)
        return flash_operator(query, key, *rest, **more)

    fused_operators.install(monkeypatch, flash=counted)
    limit = 60 * runner.layout.num_kv_heads * runner.layout.head_dim
    monkeypatch.setattr(fused_attention, "_MAX_GATHERED", limit)
    apart = logits_of(runner, *batch)
    assert len(gathered) >= 4 * runner.layout.num_layers
    assert max(gathered) <= limit
    for found, wanted in zip(apart, together, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
