"""The KV plane's compiled kernels are kept apart from the engine's, in a folder of this user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.files.code_cache import code_cache_folder

Decorator = Callable[[Any], Any]

_FOLDER = code_cache_folder(Path(__file__).parent)


def in_own_cache(
    config: Any, make_decorator: Callable[..., Decorator], *arguments: Any, **options: Any
) -> Decorator:
    """Return numba's decorator `make_decorator(*arguments, **options)`, with the folder for here.

    `config` is numba's: the decorator reads the folder from it when it meets a function.
    """
    decorate = make_decorator(*arguments, **options)

    def decorated(function: Any) -> Any:
        engines, config.CACHE_DIR = config.CACHE_DIR, _FOLDER
        try:
            return decorate(function)
        finally:
            config.CACHE_DIR = engines

    return decorated
