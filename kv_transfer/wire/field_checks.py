"""Checks of the fields of a header: a type and a bound for each, and errors that name the field."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

from common.errors import PeerProtocolError
from common.ids import Incarnation
from kv_transfer.shared.limits import MAX_LANE_BYTES, MAX_LANES, MAX_NODE_ID_CHARS

Check = Callable[[str, object], Any]
"""Takes a field's name and value, returns the value to use. Raises `PeerProtocolError`."""

_ARRAY_TYPES = {16: "H", 32: "I", 64: "Q"}
"""Type codes of unsigned integers, by their bits."""


def shown(value: object) -> str:
    """Return `value` for an error text, shortened: it may be nested too deeply to be printed."""
    is_nested = isinstance(value, list | dict | tuple)
    return f"a {type(value).__name__}" if is_nested else f"{value!r:.40}"


def uint(bits: int) -> Check:
    """Return a check for integers from 0 to 2**bits - 1."""

    def check(name: str, value: object) -> int:
        if type(value) is not int or not 0 <= value < 1 << bits:
            raise PeerProtocolError(f"{name} is {shown(value)}: wanted an integer of {bits} bits")
        return value

    return check


def text(max_chars: int) -> Check:
    """Return a check for texts of at most `max_chars` characters."""

    def check(name: str, value: object) -> str:
        if type(value) is not str or len(value) > max_chars:
            raise PeerProtocolError(f"{name} is not a text of at most {max_chars} characters")
        return value

    return check


def uints(bits: int, max_items: int) -> Check:
    """Return a check for lists of at most `max_items` integers from 0 to 2**bits - 1."""

    def check(name: str, value: object) -> tuple[int, ...]:
        # With compiled functions: every DATA frame has some hundreds of integers.
        if type(value) is list and len(value) <= max_items and set(map(type, value)) <= {int}:
            with contextlib.suppress(OverflowError):
                array(_ARRAY_TYPES[bits], value)
                return tuple(value)
        raise PeerProtocolError(
            f"{name} is not a list of at most {max_items} integers of {bits} bits"
        )

    return check


def boolean(name: str, value: object) -> bool:
    """Return a boolean, or raise `PeerProtocolError`."""
    if type(value) is not bool:
        raise PeerProtocolError(f"{name} is {shown(value)}: wanted a boolean")
    return value


def missing_means(default: object, check: Check) -> Check:
    """Return `check` for a field that earlier releases do not send; without it, `default`."""
    return lambda name, value: default if value is None else check(name, value)


def one_of(choices: tuple[str, ...]) -> Check:
    """Return a check for one of `choices`."""

    def check(name: str, value: object) -> str:
        if type(value) is not str or value not in choices:
            raise PeerProtocolError(f"{name} is {shown(value)}: wanted {', '.join(choices)}")
        return value

    return check


def blob(max_bytes: int) -> Check:
    """Return a check for at most `max_bytes` bytes."""

    def check(name: str, value: object) -> bytes:
        if type(value) is not bytes or len(value) > max_bytes:
            raise PeerProtocolError(f"{name} is not bytes, at most {max_bytes}")
        return value

    return check


def offers(name: str, value: object) -> dict[str, bytes]:
    """Return the offers of 1 to `MAX_LANES` lanes by name, or raise `PeerProtocolError`."""
    if type(value) is not dict or not 0 < len(value) <= MAX_LANES:
        raise PeerProtocolError(f"{name} is not a map of 1 to {MAX_LANES} lanes")
    lane_name, of_lane = text(MAX_NODE_ID_CHARS), blob(MAX_LANE_BYTES)
    return {lane_name(name, lane): of_lane(f"{name} of a lane", it) for lane, it in value.items()}


def incarnation(name: str, value: object) -> Incarnation:
    """Return an incarnation, or raise `PeerProtocolError`."""
    if type(value) is not dict:
        raise PeerProtocolError(f"{name} is not an incarnation")
    node_id = text(MAX_NODE_ID_CHARS)(f"{name}.node_id", value.get("node_id"))
    return Incarnation(node_id, uint(63)(f"{name}.epoch", value.get("epoch")))
