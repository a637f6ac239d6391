"""Which back end computes a model: the configured one, or the fastest that can.

A further back end is a line of `_BACK_ENDS`, a word of the setting `attention_backend`, and its
place in `_PREFERRED`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from common.errors import ConfigError
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.back_end import BackEnd
from engine.runner.weights.model_spec import DecoderSpec

_logger = logging.getLogger("pdserve.engine")


def _numba() -> BackEnd:
    from engine.runner.cpu.back_end import CpuBackEnd

    return CpuBackEnd()


def _paddle() -> BackEnd:
    from engine.runner.paddle.back_end import PaddleBackEnd

    return PaddleBackEnd()


def _triton() -> BackEnd:
    from engine.runner.gpu.back_end import GpuBackEnd

    return GpuBackEnd()


_BACK_ENDS: Mapping[str, Callable[[], BackEnd]] = {
    "numba": _numba,
    "paddle": _paddle,
    "triton": _triton,
}
_PREFERRED = ("numba", "paddle")
"""What `auto` tries, in this order. Paddle computes every model."""


def choose_back_end(model: ModelConfig, engine: EngineConfig, spec: DecoderSpec) -> BackEnd:
    """Return the back end; `ConfigError` if the configured one cannot compute this."""
    wanted = engine.attention_backend
    names = _PREFERRED if wanted == "auto" else (wanted,)
    *others, last = names
    for name in others:
        back_end = _BACK_ENDS[name]()
        problem = back_end.why_not(spec)
        if not problem:
            back_end.check(model, engine)
            return back_end
        _logger.warning("attention_backend is not %s, because %s", name, problem)
    back_end = _BACK_ENDS[last]()
    problem = back_end.why_not(spec)
    if problem:
        raise ConfigError(f"attention_backend is {last}, but {problem}; wanted paddle")
    back_end.check(model, engine)
    return back_end
