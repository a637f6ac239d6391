"""Kernels with a fault: a module of the kernels in which a text is another one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels import interpreted  # noqa: F401 # isort: skip

import pytest
from triton.runtime.interpreter import InterpretedFunction


def plant(patch: pytest.MonkeyPatch, folder: Path, module: ModuleType, old: str, new: str) -> None:
    """Let all that launches or calls the module's kernels have those with `new` instead of `old`,
    which stands there once. The text is written into `folder`."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    name = module.__name__.rpartition(".")[2]
    path = folder / f"{name}.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"planted_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    functions = {
        one: getattr(planted, own)
        for own, one in vars(module).items() if isinstance(one, InterpretedFunction)
    }  # fmt: skip
    for user in list(sys.modules.values()):
        if user.__name__.startswith("engine.runner.gpu"):
            for own, value in list(vars(user).items()):
                if isinstance(value, InterpretedFunction) and value in functions:
                    patch.setattr(user, own, functions[value])
