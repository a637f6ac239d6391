"""Compiled kernels lie in a folder into which nobody else can put files."""

from __future__ import annotations

import ast
from pathlib import Path

import numba
from numba.core import caching

from engine.runner import kernels
from engine.runner.kernels.sampling import filters
from kv_transfer.lanes import fused_copy
from kv_transfer.own_cache import keep_kernels
from kv_transfer.zmq import parts


def test_all_kernels_are_in_such_folders() -> None:
    engines, transfers = numba.config.CACHE_DIR, keep_kernels(caching)
    for module, folder in {filters: engines, fused_copy: transfers, parts: transfers}.items():
        caches = [one._cache for one in vars(module).values() if hasattr(one, "_cache")]
        assert caches
        assert all(Path(cache.cache_path).is_relative_to(folder) for cache in caches)


def test_what_kernels_take_from_elsewhere_names_their_folder() -> None:
    """A number is compiled in: one that changes in another package must change the folder."""
    taken = set()
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and _is_elsewhere(node.module or ""):
                taken |= {name.name for name in node.names if name.name.isupper()}
    only_packed = "GROUP_SIZES"  # read by Python alone
    assert taken == {"GREEDY_BELOW", only_packed}
    assert "GREEDY_BELOW)" in Path(kernels.__file__).read_text()


def _is_elsewhere(module: str) -> bool:
    is_ours = module.split(".")[0] in ("common", "engine")
    return is_ours and not module.startswith(kernels.__name__)
