"""What two processes may compile at the same time is compiled for one signature only.

numba's cache has no lock: of two processes that add other signatures of one function at the same
time, one can leave an entry that points to the other's code.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from numba.core.dispatcher import Dispatcher

from engine.runner.kernels import attention, layer
from engine.runner.kernels.products import linear
from engine.runner.kernels.sampling import sample_rows, withhold


def called_by(*modules: ModuleType) -> dict[str, Any]:
    """Return the compiled functions of these modules, and those that they call, by name."""
    found: dict[str, Any] = {}
    left = [one for module in modules for one in vars(module).values()]
    while left:
        one = left.pop()
        if isinstance(one, Dispatcher):
            function = one.py_func
            name = f"{function.__module__}.{function.__qualname__}"
            if name not in found:
                found[name] = one
                left += [function.__globals__.get(used) for used in function.__code__.co_names]
    return found


def test_layers_and_draws_share_no_function_of_several_signatures() -> None:
    of_layers, of_draws = called_by(layer, linear, attention), called_by(sample_rows, withhold)
    shared = of_layers.keys() & of_draws.keys()
    assert "engine.runner.kernels.team.claim" in shared  # else this looks at the wrong functions
    assert not sorted(name for name in shared if of_layers[name]._can_compile)
