"""Loads a model as a node does, and prints what this process compiled: one JSON list of kernels."""

from __future__ import annotations

import json
import sys
from typing import Any

from numba.core import event

from common.files.cache_folder import cache_root
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.start.load import load_model_runner


class Compilations(event.Listener):  # type: ignore[misc]
    """Notes each kernel with its argument types. A kernel from the cache makes no such event."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def on_start(self, begun: Any) -> None:
        """Note the kernel of the compilation that begins."""
        function = begun.data["dispatcher"].py_func
        self.kernels.append(f"{function.__module__}.{function.__qualname__}{begun.data['args']}")

    def on_end(self, _ended: Any) -> None:
        """Do nothing: one event per compilation is enough."""


def main(model: str) -> None:
    """Load `model`, a folder, and compute its first steps."""
    heard = Compilations()
    event.register("numba:compile", heard)
    engine = EngineConfig(num_threads=1, kv_cache_memory=16 << 20)
    packed = cache_root() / "packed"
    load_model_runner(ModelConfig(model=model), engine, packed_folder=packed).warm_up()
    print(json.dumps(heard.kernels))


if __name__ == "__main__":
    main(sys.argv[1])
