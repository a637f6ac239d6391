"""The image for GPU nodes, built from compose.gpu.yaml. No container of it runs on a GPU here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.engine import Engine
from tests.compose.project import BUILD_LIMIT_S, COMPOSE, Project
from tests.support.commands import say

SITE = "/opt/pdserve/lib/python3.11/site-packages"
MOST_BYTES = 1.2e9
"""What a node for GPUs may add to its base image."""
COMPILE = """
from engine.runner.gpu.compiling import use_own_cache
use_own_cache()
from engine.runner.gpu.kernels.gathering import gather_rows
from engine.runner.gpu.launcher import KernelSpec
types = {"source": "*bf16", "rows": "*i32", "out": "*bf16"}
constants = {"N": 1024, "COLUMNS": 1024, "IS_PROGRAMMATIC": False}
print(len(KernelSpec(gather_rows, types, constants).compile(90).asm["cubin"]) > 0)
"""

CHECK = """
from common.errors import ConfigError
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.gpu.back_end import GpuBackEnd
try:
    GpuBackEnd().check(ModelConfig(), EngineConfig(block_size=32))
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def gpu_image(engine: Engine, images: dict[str, str], models: Path) -> str:
    """Build the image and return its name."""
    name = "pdserve-test-node-gpu"
    settings = {**images, "GPU_NODE_IMAGE": name, "KEYS_FOLDER": "/", "MODELS_FOLDER": str(models)}
    files = [COMPOSE / "compose.yaml", COMPOSE / "compose.gpu.yaml"]
    say("building the image for GPUs (a minute the first time)")
    Project(engine, "pdserve-test-gpu", files, settings).run(
        "build", "prefill", limit_s=BUILD_LIMIT_S
    )
    return name


def run(engine: Engine, image: str, *arguments: str, **options: object) -> str:
    """Run a command as compose.yaml does: as the image's user, on a file system it cannot write."""
    said = engine.client.containers.run(
        image, list(arguments), network_mode="none", read_only=True, remove=True, stderr=True,
        tmpfs={"/tmp": "", "/var/cache/pdserve": "mode=1777,exec"}, **options,
    )  # fmt: skip
    return str(said.decode())


def test_it_has_triton_and_neither_paddle_nor_cuda(engine: Engine, gpu_image: str) -> None:
    installed = run(engine, gpu_image, "-c", f"ls {SITE}", entrypoint="sh").split()
    assert {"triton", "engine", "numba"} <= set(installed)
    assert not {"paddle", "torch", "nvidia"} & set(installed)


def test_it_is_small(engine: Engine, images: dict[str, str], gpu_image: str) -> None:
    size, base = (
        engine.client.images.get(name).attrs["Size"] for name in (gpu_image, images["PYTHON_IMAGE"])
    )
    assert 0 < size - base < MOST_BYTES


def test_it_compiles_kernels_without_a_compiler(engine: Engine, gpu_image: str) -> None:
    said = run(engine, gpu_image, "-c", COMPILE, entrypoint="/opt/pdserve/bin/python")
    assert said.split()[-1] == "True", said


def test_a_machine_without_a_gpu_is_told_of(engine: Engine, gpu_image: str) -> None:
    said = run(engine, gpu_image, "-c", CHECK, entrypoint="/opt/pdserve/bin/python")
    assert "NVIDIA" in said, said
