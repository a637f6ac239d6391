"""A folder in AWQ, through `pdserve up`: its answers are those of the same weights in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tests.support.models.hub_formats import Awq, pack_folder
from tests.support.models.odd_models import answer, served
from tests.support.models.tiny_model import make_tiny_model, tiny_config, tiny_weights

PROMPTS = ("ab", "The rain", "{0}")


@pytest.mark.timeout(300)
def test_answers_of_a_cluster_are_those_of_the_same_weights(tmp_path: Path) -> None:
    """With activations in float32: in int8, products of blocks differ from those of floats."""
    packed, wide = (make_tiny_model(tmp_path / name) for name in ("packed", "wide"))
    values = pack_folder(packed, tiny_config(), tiny_weights(7), Awq(32))
    save_file(values, wide / "model.safetensors")
    said = []
    for folder in (packed, wide):
        with served(folder, tmp_path, "--activation-dtype", "float32") as client:
            said.append(
                [
                    answer(client, "completions", prompt=prompt, max_tokens=40)["choices"]
                    for prompt in PROMPTS
                ]
            )
    assert said[0] == said[1]
    assert len({choices[0]["text"] for choices in said[0]}) == len(PROMPTS)
