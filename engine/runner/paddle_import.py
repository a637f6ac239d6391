"""Paddle, imported at its first use: `from engine.runner.paddle_import import paddle`.

The kernels, on CPUs and on GPUs, do not need it, nor that it is installed: a node that computes
with them starts sooner, and takes less memory, without it. Paddle computes where the back end
"paddle" is configured, or the kernels cannot take a model's sizes. Its import takes a second and
installs signal handlers, so who needs it for certain calls
`import_paddle` when that does no harm.

On processors other than Intel's, the CPU wheel's math library takes a slow path unless an
environment variable is set before it loads. So Paddle is imported only here, after that variable is
set.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import re
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numba

from common.control_group import num_cores
from common.errors import ConfigError

_spec = importlib.util.find_spec("paddle")
_WITHOUT_CUDA = re.compile(r"^cuda_version\s*=\s*'False'", re.MULTILINE)
"""What the wheel for CPUs says in its file of versions."""
_lock = threading.Lock()
_kept: list[object] = []
"""What keeps Paddle in its dynamic mode. The thread that imports Paddle owns it: at the end of the
thread that loads a model it would be closed, and every step of other threads would fail."""


def import_paddle() -> ModuleType:
    """Import Paddle, unless it is imported already; `ConfigError` where it is not installed."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Paddle recommends compilers for extensions
        if _is_amd():
            os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")
        is_first = "paddle" not in sys.modules
        try:
            module = importlib.import_module("paddle")
        except ModuleNotFoundError as error:
            if error.name != "paddle":
                raise
            raise ConfigError(
                "Paddle is not installed: wanted pip install '.[cpu]', or '.[paddle-gpu]' with "
                "Paddle's package index"
            ) from None
        if is_first:
            _kept.append(module.base.framework.global_var._functional_dygraph_context_manager)
        return module


class _ImportedAtUse(ModuleType):
    """A module whose names are those of Paddle, which the first of them imports."""

    def __getattr__(self, name: str) -> Any:
        # An import asks for names such as __path__ and __spec__ of what it imports from.
        if name.startswith("__"):
            raise AttributeError(name)
        module = import_paddle()
        self.__dict__.update(vars(module))
        return getattr(module, name)


if TYPE_CHECKING:
    import paddle
else:
    paddle = _ImportedAtUse("paddle")


def has_paddle() -> bool:
    """Return whether Paddle is imported."""
    return "paddle" in sys.modules


def has_gpu() -> bool:
    """Return whether this Paddle can compute on a GPU of this machine."""
    if not _may_have_cuda():
        return False
    return bool(paddle.device.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0)


@functools.cache
def _may_have_cuda() -> bool:
    """Return False without Paddle, and for the wheel for CPUs; neither is imported to find out."""
    if _spec is None:
        return False
    for folder in _spec.submodule_search_locations or ():
        try:
            text = (Path(folder) / "version" / "__init__.py").read_text(encoding="utf-8")
        except OSError:
            continue
        return _WITHOUT_CUDA.search(text) is None
    return True


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def set_num_threads(num_threads: int) -> None:
    """Use `num_threads` CPU threads in the kernels, and in Paddle if it is imported.

    0: one for each core that this process may keep busy.

    Raises `ConfigError` when the machine has fewer.
    """
    available = numba.config.NUMBA_NUM_THREADS
    if num_threads > available:
        raise ConfigError(f"num_threads is {num_threads}: wanted 0 to {available} (all cores)")
    chosen = num_threads or min(available, num_cores())
    if has_paddle():
        paddle.base.core.set_num_threads(chosen)
    numba.set_num_threads(chosen)
    _keep_thread_pool()


def _keep_thread_pool() -> None:
    """Prevent the interpreter from unloading numba's TBB thread pool.

    Unloading waits for the pool's work to end. On one core that never happens if the kernels ran in
    a thread that has ended. A further reference keeps the pool until the process ends.
    """
    pool = sys.modules.get("numba.np.ufunc.tbbpool")
    if pool is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
