"""Settings that a machine without a GPU refuses, checked before anything is compiled or read."""

from __future__ import annotations

from common.errors import ConfigError
from common.settings.config import EngineConfig, ModelConfig


def check_cpu_settings(model: ModelConfig, engine: EngineConfig) -> None:
    """Raise `ConfigError` for a dtype or an attention back end that wants a GPU."""
    if model.dtype not in ("auto", "float32"):
        raise ConfigError(
            f"dtype is {model.dtype}: a CPU computes in float32; wanted auto or float32"
        )
    if engine.attention_backend == "fused":
        raise ConfigError("attention_backend is fused: wanted a GPU; here: numba or paddle")
