"""The KV plane's compiled kernels are kept apart from the engine's, in a folder of this user."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from common.files.code_cache import keep_compiled


@cache
def keep_kernels(caching: Any) -> str:
    """Set the folder in which `numba.core.caching` keeps this package's kernels; return it."""
    return keep_compiled(caching, Path(__file__).parent)
