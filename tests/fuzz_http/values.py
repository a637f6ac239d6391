"""Numbers, texts and JSON that parsers disagree on, and changes of a valid value."""

from __future__ import annotations

import copy
import json
import random
from typing import Any


class Raw(str):
    """A piece of a JSON text that is written as it is, valid or not."""


class Pairs(list[tuple[str, Any]]):
    """An object whose names may repeat."""


NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 100, -100, 127, 128, 255, 256, 1000, 65_535, 65_536),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64),
    *(-(2**63) - 1, 10**30, -(10**30), 10**400, 0.0, -0.0, 0.1, 0.5, 1.0, -1.5, 1e-320, 1e308),
    *(Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e400"), Raw("-0"), Raw("1E+2")),
    *(Raw("01"), Raw("0x10"), Raw("1."), Raw(".5"), Raw("1e"), Raw("9" * 5000), Raw("1e-99999")),
)
TEXTS = (
    *("", " ", "a", "Hi", "tiny", "user", "object", "stop", "auto", "0", "null", "true", "*", "$"),
    *(
        "\x00",
        "a\x00b",
        "\x7f",
        "\x1b[31m",
        "\r\n",
        "\ufeff",
        "\u2028\u2029",
        "\u202eabc",
        "\uffff",
    ),
    *(
        "\ud800",
        "\udc00\ud800",
        "a\udfff",
        "\U0010ffff",
        "é",
        "e\u0301" * 20,
        "ß",
        "\u0130",
        "中文",
    ),
    *("👩‍👩‍👧‍👦", "\U0001f600" * 30, "\u200d" * 50, "z\u0334\u0321\u0347" * 20),
    *("<eos>", "<bos>", "<|im_end|>", "<|im_start|>assistant", "</think>", "<think>", "[INST]"),
    *("<tool_call>", '<tool_call>{"name":', "```tool_call\n{", "{{ 7*7 }}", "{% for %}", "{%"),
    *("../../etc/passwd", "%s%n%d", "{0.__class__}", "'; --", "\\", '"', "\\u0000", "__proto__"),
    *("-1", "1e999", "NaN", "2023-02-29", "#/$defs/a", "data: [DONE]\n\n", "\n\n", "id", "a" * 300),
)
NAMES = (
    *("model", "messages", "prompt", "stream", "n", "tools", "role", "content", "type", "function"),
    *("name", "parameters", "arguments", "json_schema", "schema", "", "\x00", "a.b", "$ref", "é"),
    *("__class__", "constructor", "model_config", "model_extra", "self", "validate", "x" * 300),
)

LARGE_CHARS = 2000


def any_text(rng: random.Random) -> str:
    """Return a text: mostly a short one, at times one that a process plans, or that is refused."""
    where = rng.random()
    if where < 0.75:
        return rng.choice(TEXTS)
    if where < 0.9:
        return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(1, 6)))
    if where < 0.99:
        return rng.choice(TEXTS)[:8] * rng.randrange(1, 2000)
    return rng.choice(("a", "é", "中", "\x00", "{", "<eos>")) * rng.randrange(20_000, 200_000)


def any_value(rng: random.Random, depth: int = 3) -> Any:
    """Return any JSON value."""
    where = rng.random()
    if where < 0.3:
        return rng.choice(NUMBERS)
    if where < 0.55:
        return any_text(rng)
    if where < 0.7 or depth == 0:
        return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}, Raw("nul")))
    if where < 0.8:
        return [any_value(rng, depth - 1) for _ in range(rng.randrange(5))]
    if where < 0.83:
        return nested(rng)
    if where < 0.86:
        one: Any = rng.choice((None, 1, "", "a", [], {}, [{}], Raw("NaN")))
        return [one] * rng.choice((10, 130, 2000, 33_000))
    pairs = [
        (rng.choice(NAMES), any_value(rng, depth - 1)) for _ in range(rng.choice((1, 2, 3, 9)))
    ]
    return Pairs(pairs) if rng.random() < 0.3 else dict(pairs)


def nested(rng: random.Random) -> Raw:
    """Return lists or objects in each other, at times without their ends."""
    depth = rng.choice((5, 63, 64, 65, 199, 200, 201, 1000, 5000, 100_000))
    begin, end = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"items":', "}]"), ('{"":[', "]}")))
    inner = rng.choice(("1", "{}", "null", '"x"'))
    return Raw(begin * depth + inner + (end * depth if rng.random() < 0.9 else ""))


def changed(rng: random.Random, value: Any, times: int) -> Any:
    """Return a copy of a value, with `times` changes at places of it."""
    value = copy.deepcopy(value)
    for _ in range(times):
        holder = [value]
        place: tuple[Any, Any] = (holder, 0)
        while True:
            inner = place[0][place[1]]
            if isinstance(inner, Raw) or not isinstance(inner, dict | list) or not inner:
                break
            if inner is not value and rng.random() < 0.3:
                break
            place = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        _change(rng, *place)
        value = holder[0]
    return value


def _change(rng: random.Random, holder: Any, key: Any) -> None:
    """Change what is at one place."""
    old = holder[key]
    if isinstance(holder, Pairs):
        name, old = old
    way = rng.randrange(8)
    new = any_value(rng)
    if way == 0 and isinstance(holder, dict):
        del holder[key]
        return
    if way == 1 and isinstance(holder, dict):
        holder[rng.choice(NAMES)] = new
        return
    if way == 2 and isinstance(old, dict):
        new = Pairs([*old.items(), *old.items(), (rng.choice(NAMES), new)])
    elif way == 3:
        is_large = len(repr(old)) > LARGE_CHARS
        new = [old] * rng.choice((1, 2) if is_large else (1, 2, 17, 129))
    elif way == 4 and isinstance(old, str):
        at = rng.randrange(len(old) + 1)
        new = old[:at] + any_text(rng) + old[at + rng.randrange(3) :]
    elif way == 5 and isinstance(old, int | float):
        new = rng.choice(NUMBERS)
    elif way == 6:
        new = str(old)
    holder[key] = (name, new) if isinstance(holder, Pairs) else new


def as_json(rng: random.Random, value: Any) -> bytes:
    """Return a value as JSON text; lone surrogates become bytes that are no UTF-8, or escapes."""
    parts: list[str] = []
    _write(value, parts, is_ascii=rng.random() < 0.5)
    return "".join(parts).encode("utf-8", "surrogatepass")


def _write(value: Any, parts: list[str], *, is_ascii: bool) -> None:
    if isinstance(value, Raw):
        parts.append(value)
    elif isinstance(value, dict | Pairs):
        parts.append("{")
        pairs = value.items() if isinstance(value, dict) else value
        for number, (name, one) in enumerate(pairs):
            parts.append(("," if number else "") + json.dumps(name, ensure_ascii=is_ascii) + ":")
            _write(one, parts, is_ascii=is_ascii)
        parts.append("}")
    elif isinstance(value, list | tuple):
        parts.append("[")
        for number, one in enumerate(value):
            parts.append("," if number else "")
            _write(one, parts, is_ascii=is_ascii)
        parts.append("]")
    else:
        parts.append(json.dumps(value, ensure_ascii=is_ascii))
