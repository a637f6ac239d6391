"""Text and TOML values to settings and back."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from common.settings.setting import size_text
from pdserve.configuration.options import Option, Value

_LARGEST = 2**63 - 1
_MOST_DIGITS = 20
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    # As Docker, systemd and the JVM read a single letter, and Kubernetes one with an i.
    **{letter + i: 1 << 10 * power for power, letter in enumerate("kmgt", 1) for i in ("", "i")},
}
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# The number of digits is limited, because a very long number takes long to compute.
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,12})?(?:e\+?[0-9]{1,2})?)\s*([a-z]*)")
_TIME = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,12})?)\s*([a-z]+)")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

WANTED = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "bytes": "a number of bytes, such as 512MiB, 2G or 1e9",
    "seconds": "a number of seconds, or a time such as 90s, 5m or 1h",
}


def value_from_text(option: Option, text: str | bool) -> Value:
    """Return what a flag or a variable says. Raises `ValueError` naming what was wanted."""
    if isinstance(text, bool):  # --name and --no-name carry their value in the flag
        return text
    match option.kind:
        case "str":
            return checked_text(text)
        case "int":
            return _in_range(_whole_number(text))
        case "float":
            return _finite(option, text)
        case "seconds":
            return _time_s(option, text)
        case "bool":
            return _truth(text)
        case _:
            return _in_range(_size_bytes(text))


def count_from_text(text: str) -> int | None:
    """Return the number that digits alone spell, which are `_MOST_DIGITS` at most; else None."""
    is_count = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_count else None


def value_from_toml(option: Option, raw: object) -> Value:
    """Return what a TOML key holds. Types are strict, but a size or a time can be a number or text.

    Raises `ValueError` naming what was wanted.
    """
    is_number = isinstance(raw, int | float) and not isinstance(raw, bool)
    match option.kind:
        case "str" if isinstance(raw, str):
            return checked_text(raw)
        case "int" if isinstance(raw, int) and is_number:
            return _in_range(raw)
        case "seconds" if isinstance(raw, str):
            return _time_s(option, raw)
        case "float" | "seconds" if is_number:
            return _finite(option, str(raw))
        case "bool" if isinstance(raw, bool):
            return raw
        case "bytes" if isinstance(raw, str):
            return _in_range(_size_bytes(raw))
        case "bytes" if isinstance(raw, int) and is_number:
            return _in_range(raw)
        case "bytes" if isinstance(raw, float) and raw.is_integer():
            return _in_range(int(raw))
    raise ValueError(f"wanted {WANTED[option.kind]}")


def shown_value(option: Option, value: Value) -> str:
    """Return a value as a person writes it: sizes with the largest unit that divides them."""
    if option.kind == "bytes" and isinstance(value, int):
        return size_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def checked_text(text: str) -> str:
    """Return the text. Raises `ValueError` for one that no file of settings can hold."""
    if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in text):
        raise ValueError("wanted UTF-8 text without control characters")
    return text


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", text) or len(text) > 30:
        raise ValueError(f"wanted {WANTED['int']}")
    return int(text)


def _finite(option: Option, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"wanted {WANTED[option.kind]}")
    return value


def _time_s(option: Option, text: str) -> float:
    match = _TIME.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS_S:
        return _finite(option, text)
    return float(match[1]) * _UNITS_S[match[2]]


def _truth(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"wanted {WANTED['bool']}")


def _size_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"wanted {WANTED['bytes']}")
    size_bytes = Decimal(match[1]) * _UNITS[match[2]]
    if size_bytes != int(size_bytes):
        raise ValueError("wanted a whole number of bytes")
    return int(size_bytes)


def _in_range(value: int) -> int:
    if abs(value) > _LARGEST:
        raise ValueError(f"wanted at most {_LARGEST}")
    return value
