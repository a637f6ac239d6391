"""One setting of the configuration, and the rules that many settings share.

A rule returns what is wrong in words, name, value and what was wanted: an empty list when nothing
is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any


def setting(default: Any, help_text: str, **metadata: Any) -> Any:
    """A dataclass field with its help text; `unit` is "bytes" or "s" where the value has one."""
    return field(default=default, metadata={"help": help_text, **metadata})


def must_be_one_of(name: str, value: str, known: Sequence[str]) -> list[str]:
    """A name out of a list."""
    if value in known:
        return []
    return [f"{name} is {value!r}: wanted {', '.join(known[:-1])} or {known[-1]}"]


def must_be_at_least(name: str, value: float, least: int) -> list[str]:
    """A finite number with a lower bound."""
    return [] if least <= value < math.inf else [f"{name} is {value}: wanted {least} or more"]


def must_be_above_zero(name: str, value: float) -> list[str]:
    """A finite number of which there has to be some."""
    return [] if 0 < value < math.inf else [f"{name} is {value}: wanted above 0"]


def must_be_a_share(name: str, value: float) -> list[str]:
    """A number from 0 to 1."""
    return [] if 0 <= value <= 1 else [f"{name} is {value}: wanted 0 to 1"]
