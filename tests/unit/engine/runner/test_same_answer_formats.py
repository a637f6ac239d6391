"""Every format × arithmetic: a token's logits do not depend on chunks, neighbours or threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from engine.runner.model_runner import ModelRunner
from engine.runner.weights.derived.quantised_source import WIDE_FORMATS
from engine.runner.weights.stored_tensor import GROUP_SIZES
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from tests.support.models.running import load, logits_in_chunks, logits_of, scheduled
from tests.support.models.tiny_checkpoints import prompt_of
from tests.support.models.tiny_gguf import K_CONFIG, write_gguf

PROMPT = prompt_of(40)
TABLE = [12, 3, 5]
PARTS = (
    "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "lm_head",
)  # fmt: skip
ARITHMETICS = [
    (name, dtype, "auto")
    for name in GROUP_SIZES
    for dtype in ("float32", "int8")
    if dtype == "float32" or name not in WIDE_FORMATS
]
KV_DTYPES = [("Q4_K", "int8", "int8"), ("Q5_0", "int8", "bfloat16"), ("Q6_K", "float32", "int8")]
CONFIG = K_CONFIG | {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            file = made[name].with_suffix(".gguf")
            write_gguf(file, CONFIG, dict.fromkeys(PARTS, name))
            make_gguf_folder(file, made[name])
        return made[name]

    return folder


@pytest.mark.parametrize(("name", "activations", "kv_dtype"), [*ARITHMETICS, *KV_DTYPES])
def test_any_chunks_neighbours_and_threads(
    folder_of: Callable[[str], Path], name: str, activations: str, kv_dtype: str
) -> None:
    make: Callable[..., ModelRunner] = partial(
        load, folder_of(name), 128, activation_dtype=activations, kv_cache_dtype=kv_dtype
    )
    runner = make()
    assert f"weights in {name}, activations in {activations}" in runner.layout.arithmetic
    [whole] = logits_of(runner, scheduled(PROMPT, 0, TABLE))
    assert np.isfinite(whole).all()
    for chunk in (3, 13, 39):
        runner.kv_bytes.fill(0xFF)
        found = logits_in_chunks(runner, PROMPT, TABLE, chunk)
        np.testing.assert_array_equal(found, whole)
    for num_neighbours in (1, 4):
        neighbours = [
            scheduled(prompt_of(1 + i, seed=i), 0, [30 + i]) for i in range(num_neighbours)
        ]
        batch = [*neighbours, scheduled(PROMPT[-1:], 39, TABLE)]
        np.testing.assert_array_equal(logits_of(runner, *batch)[-1], whole)
    alone = make(num_threads=1)
    np.testing.assert_array_equal(logits_in_chunks(alone, PROMPT, TABLE, 17), whole)
