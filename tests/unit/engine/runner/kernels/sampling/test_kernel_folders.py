"""Compiled kernels lie in a folder into which nobody else can put files."""

from __future__ import annotations

from pathlib import Path

import kv_transfer
from common.files.code_cache import code_cache_folder
from engine.runner import kernels
from engine.runner.kernels.sampling import filters
from kv_transfer.lanes import fused_copy
from kv_transfer.zmq import parts


def test_all_kernels_are_in_such_folders() -> None:
    packages = {filters: kernels, fused_copy: kv_transfer, parts: kv_transfer}
    for module, package in packages.items():
        assert package.__file__
        folder = code_cache_folder(Path(package.__file__).parent)
        caches = [one._cache for one in vars(module).values() if hasattr(one, "_cache")]
        assert caches
        assert all(Path(cache.cache_path).is_relative_to(folder) for cache in caches)
