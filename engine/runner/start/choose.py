"""Which back end computes a model: the configured one, or the fastest that can.

A further back end is a line of `BACK_ENDS`, a word of the setting `attention_backend`, and its
place in `_preferred`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from common.errors import ConfigError
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.back_end import BackEnd, ModelFiles

_logger = logging.getLogger("pdserve.engine")


def _numba(engine: EngineConfig) -> BackEnd:
    from engine.runner.cpu.back_end import CpuBackEnd

    return CpuBackEnd()


def _paddle(engine: EngineConfig) -> BackEnd:
    from engine.runner.paddle.back_end import PaddleBackEnd

    return PaddleBackEnd()


def _triton(engine: EngineConfig) -> BackEnd:
    from engine.runner.gpu.back_end import GpuBackEnd

    return GpuBackEnd(int(engine.gpus.split(",")[0] or 0))


BACK_ENDS: Mapping[str, Callable[[EngineConfig], BackEnd]] = {
    "numba": _numba,
    "paddle": _paddle,
    "triton": _triton,
}


def _preferred(engine: EngineConfig) -> tuple[str, ...]:
    """Return what `auto` tries, in this order. Paddle computes every model."""
    from engine.runner.gpu.back_end import has_card

    if engine.gpus:
        return ("triton",)
    return ("triton", "numba", "paddle") if has_card() else ("numba", "paddle")


def choose_back_end(model: ModelConfig, engine: EngineConfig, files: ModelFiles) -> BackEnd:
    """Return the back end; `ConfigError` if the configured one cannot compute this.

    With `auto` the first one that can is taken; why those before it cannot is in the log.
    """
    wanted = engine.attention_backend
    names = _preferred(engine) if wanted == "auto" else (wanted,)
    for name in names[:-1]:
        try:
            return _checked(name, model, engine, files)
        except ConfigError as error:
            _logger.warning("%s", error)
    return _checked(names[-1], model, engine, files)


def _checked(name: str, model: ModelConfig, engine: EngineConfig, files: ModelFiles) -> BackEnd:
    """Return a back end; `ConfigError` if it cannot compute this."""
    back_end = BACK_ENDS[name](engine)
    problem = back_end.why_not(files)
    if problem:
        others = "paddle" if name == "numba" else "numba or paddle"
        raise ConfigError(f"attention_backend is {name}, but {problem}; wanted {others}")
    back_end.check(model, engine)
    return back_end
