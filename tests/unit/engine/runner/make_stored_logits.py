"""Store transformers' logits of the tiny checkpoints: `python make_stored_logits.py`.

Run from the repository's root by an interpreter that has torch and transformers; writes
data/stored_logits.json beside this file.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.support.models.tiny_checkpoints import (
    CONFIGS,
    prompt_of,
    write_checkpoint,
)
from tests.support.tiny_kin import TINY_VISION

LENGTHS = (1, 100)


def transformers_logits(folder: Path, token_ids: list[int]) -> list[float]:
    """Float32 logits of the last position."""
    values = json.loads((folder / "config.json").read_text())
    kind: Any = AutoModelForCausalLM
    config = None
    if values["model_type"] == "mimo":  # its own code is Qwen2's with MTP layers beside it
        kind, config = Qwen2ForCausalLM, Qwen2Config(**values | {"model_type": "qwen2"})
    if values["model_type"] == "qwen2_5_vl":
        kind = Qwen2_5_VLForConditionalGeneration
    if values["model_type"] == "qwen3_vl_text":
        model = _with_images(folder, values)
    else:
        model = kind.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [float(x) for x in model(torch.tensor([token_ids])).logits[0, -1]]


def _with_images(folder: Path, values: dict[str, Any]) -> Any:
    """A whole model with images, whose text model is that of `folder`."""
    vision = TINY_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=values, vision_config=vision)
    ).eval()
    tensors = load_file(folder / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    missing, unknown = model.load_state_dict(inner, strict=False)
    assert not unknown
    assert all("visual" in name for name in missing)
    return model


def main() -> None:
    stored: dict[str, dict[str, list[float]]] = {}
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_checkpoint(Path(folder), config)
            stored[name] = {
                str(n): [round(x, 5) for x in transformers_logits(checkpoint, prompt_of(n))]
                for n in LENGTHS
            }
    target = Path(__file__).with_name("data") / "stored_logits.json"
    lines = (f' "{name}": {json.dumps(logits)}' for name, logits in stored.items())
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
