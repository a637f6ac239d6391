"""Types of values that come from other processes, with the limits that every decoder checks.

A decoder is a `pydantic.TypeAdapter`, which finds `Bounds` in the annotations. This module does not
import pydantic: it knows only the name of the method that pydantic calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

MAX_NUMBER = 2**53
"""Largest number: up to it every whole number is exact in JSON, in every reader."""
MAX_TEXT = 512
"""Most characters of a text."""

_HOST_AND_PORT = re.compile(r"[!-~]+:([0-9]{1,5})")


class Bounds:
    """What a decoded value must keep to.

    `keywords` are those of pydantic's core schemas, such as `ge` and `max_length`. `check` returns
    the value, or raises `ValueError` in words.
    """

    def __init__(self, check: Callable[[Any], Any] | None = None, **keywords: Any) -> None:
        self._check = check
        self._keywords = keywords

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Return the schema of the annotated type with these limits."""
        schema = {**handler(source), **self._keywords}
        if self._check is None:
            return schema
        check = {"type": "no-info", "function": self._check}
        return {"type": "function-after", "function": check, "schema": schema}


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"{text!a} has characters that cannot be printed")
    return text


def _address(text: str) -> str:
    match = _HOST_AND_PORT.fullmatch(text)
    if text and (match is None or not 1 <= int(match[1]) <= 65_535):
        raise ValueError(f"{text!a} is not HOST:PORT")
    return text


Flag = Annotated[bool, Bounds(strict=True)]
Count = Annotated[int, Bounds(strict=True, ge=0, le=MAX_NUMBER)]
Size = Annotated[int, Bounds(strict=True, ge=1, le=MAX_NUMBER)]
Share = Annotated[float, Bounds(strict=True, ge=0, le=1)]
Text = Annotated[str, Bounds(_printable, strict=True, max_length=MAX_TEXT)]
Name = Annotated[str, Bounds(_printable, strict=True, min_length=1, max_length=MAX_TEXT)]
Address = Annotated[str, Bounds(_address, strict=True, min_length=1, max_length=MAX_TEXT)]
OptionalAddress = Annotated[str, Bounds(_address, strict=True, max_length=MAX_TEXT)]
