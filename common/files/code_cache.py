"""The folder from which compiled kernels are loaded, and whose files are this user's own."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from common.files.cache_folder import cache_root, full_path
from common.files.trusted_folder import why_untrusted

_logger = logging.getLogger("pdserve")


def code_cache_folder(sources: Path, *facts: object) -> str:
    """Return the folder for what is compiled from `facts` and the `*.py` below `sources`.

    It is in `$NUMBA_CACHE_DIR`, or in the cache folder. Where another user could put code into it,
    it is an empty folder of this process instead, and a warning says why. Raises `ConfigError`
    where the cache folder is unknown.
    """
    folder, named = _wanted_folder(sources, facts)
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


def keep_compiled(caching: Any, sources: Path, *facts: object) -> str:
    """Make numba cache there what it compiles below `sources`, and return the folder.

    `caching` is `numba.core.caching`; to be called before kernels are decorated. By itself numba
    loads nothing that was compiled from equal files in another place: every copy of this package
    would compile for itself. `facts` are what the files take from elsewhere and compile in.

    Raises `ConfigError` where the cache folder is unknown.
    """
    folder = code_cache_folder(sources, *facts)

    class BySource(caching._CacheLocator):  # type: ignore[misc]  # numba has no types
        """Where one function is kept: the folder's name says what it was compiled from."""

        def __init__(self, function: Any, file: Path) -> None:
            self._path = Path(folder) / file.parent.relative_to(sources)
            self._line = function.__code__.co_firstlineno

        def get_cache_path(self) -> str:
            return str(self._path)

        def get_source_stamp(self) -> str:
            return ""

        def get_disambiguator(self) -> str:
            return str(self._line)

        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            """Return None for the functions of others."""
            return cls(function, Path(file)) if Path(file).is_relative_to(sources) else None

    caching.CacheImpl._locator_classes.insert(0, BySource)
    caching.Cache._guard_against_spurious_io_errors = _kept_if_possible
    if caching.IndexDataCacheFile.__module__ == caching.__name__:
        caching.IndexDataCacheFile = _whole_files(caching.IndexDataCacheFile)
    return folder


def _whole_files(base: Any) -> Any:
    """Return numba's class of the files of one function, for which a broken file is a missing one.

    By itself numba ends the process with such a file, at each start: nothing replaces it.
    """

    class WholeFiles(base):  # type: ignore[misc]  # numba has no types
        def load(self, key: Any) -> Any:
            try:
                return super().load(key)
            except OSError:
                raise
            except Exception as error:  # bytes that are no pickle raise anything
                _say_broken(self._index_path, error)
                return None  # what is compiled instead is written over it

        def _load_index(self) -> Any:
            try:
                return super()._load_index()
            except OSError:
                raise
            except Exception as error:
                _say_broken(self._index_path, error)
                return {}

        @contextmanager
        def _open_for_write(self, filepath: str) -> Iterator[Any]:
            with super()._open_for_write(filepath) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # a loss of power would leave its name without its bytes

    return WholeFiles


@contextmanager
def _kept_if_possible(_cache: object) -> Iterator[None]:
    """Let numba compile where it cannot load, and go on where it cannot save.

    By itself it does so on Windows alone: elsewhere a full disk would end the process, and what a
    folder that is only read has would not be loaded.
    """
    try:
        yield
    except OSError as error:
        _say_once(error.strerror or str(error))


def _say_broken(path: str, error: Exception) -> None:
    _logger.warning("%s: the file or what it names is broken, and made anew: %r", path, error)


@cache
def _say_once(why: str) -> None:
    _logger.warning(
        "compiled kernels cannot be kept, and are compiled at each start: %s "
        "(PDSERVE_CACHE names another folder)",
        why,
    )


def _wanted_folder(sources: Path, facts: tuple[object, ...]) -> tuple[Path, Path | None]:
    """Return the folder for these sources, and the one above it that a variable names, if any."""
    digest = hashlib.sha256(repr(facts).encode())
    for path in sorted(sources.rglob("*.py")):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(sources)} {len(contents)} ".encode() + contents)
    name = digest.hexdigest()[:16]
    environment = os.environ
    if numbas := environment.get("NUMBA_CACHE_DIR"):
        named = full_path(numbas)
        return named / name, named
    if ours := environment.get("PDSERVE_CACHE"):
        named = full_path(ours)
        return named / "numba" / name, named
    return cache_root() / "numba" / name, None
