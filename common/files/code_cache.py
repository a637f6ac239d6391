"""The folder from which compiled kernels are loaded, and whose files are this user's own."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from common.files.cache_folder import cache_root, full_path
from common.files.trusted_folder import why_untrusted

_logger = logging.getLogger("pdserve")


def code_cache_folder(sources: Path) -> str:
    """Return the folder for what is compiled from the `*.py` below the folder `sources`.

    It is in `$NUMBA_CACHE_DIR`, or in the cache folder. Where another user could put code into it,
    it is an empty folder of this process instead, and a warning says why. Raises `ConfigError`
    where the cache folder is unknown.
    """
    folder, named = _wanted_folder(sources)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = why_untrusted(folder, below=named)
    except OSError:
        return str(folder)  # there is nothing to load; who compiles says that it cannot be kept
    if not problem:
        return str(folder)
    _logger.warning(
        "compiled kernels are not taken from %s, and are compiled for this process alone: %s",
        folder,
        problem,
    )
    own = tempfile.mkdtemp(prefix="kernels-of-pdserve-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return own


def _wanted_folder(sources: Path) -> tuple[Path, Path | None]:
    """Return the folder for these sources, and the one above it that a variable names, if any."""
    digest = hashlib.sha256()
    for path in sorted(sources.rglob("*.py")):
        digest.update(path.read_bytes())
    name = digest.hexdigest()[:16]
    environment = os.environ
    if numbas := environment.get("NUMBA_CACHE_DIR"):
        named = full_path(numbas)
        return named / name, named
    if ours := environment.get("PDSERVE_CACHE"):
        named = full_path(ours)
        return named / "numba" / name, named
    return cache_root() / "numba" / name, None
