"""The log of a router as a trace: a line for each request that has ended.

Lines are those that a router writes with `--log-format json`. A request came `duration_ms` before
its line. What prompts have in common is not in a log, so no prefix is found in a cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from simulator.trace_file import TraceRequest

HUMAN_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ \S+: ")
_ENDED = "request ended"


def is_log_line(line: str) -> bool:
    """Return whether this is a line of a process with `--log-format json`."""
    row = _row(line)
    return row is not None and {"time", "logger", "message"} <= row.keys()


def read_access_log(path: Path, model: str) -> tuple[list[TraceRequest], str]:
    """Return the requests of a log for `model` (empty: the only one), by arrival from 0, and the
    model's name.

    Raises `ConfigError`, which says what is missing in the log.
    """
    by_model: dict[str, list[TraceRequest]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for name, request in _requests(lines, path):
            by_model.setdefault(name, []).append(request)
    if not by_model:
        raise ConfigError(
            f"trace {path} has no line of a request that was answered: wanted the log of a router "
            "that runs with --log-format json and --log-level info"
        )
    if not model and len(by_model) > 1:
        raise ConfigError(
            f"trace {path} has requests for {', '.join(sorted(by_model))}: wanted --model with "
            "one of them"
        )
    model = model or min(by_model)
    if model not in by_model:
        raise ConfigError(
            f"trace {path} has no request for {model}: wanted {', '.join(sorted(by_model))}"
        )
    found = sorted(by_model[model], key=lambda request: request.arrival_s)
    began_s = found[0].arrival_s
    return [TraceRequest(r.arrival_s - began_s, r.num_prompt, r.num_output) for r in found], model


def _requests(lines: Iterable[str], path: Path) -> Iterator[tuple[str, TraceRequest]]:
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None or not str(row.get("message", "")).startswith(_ENDED):
            continue
        try:
            num_prompt, num_output = _count(row, "prompt_tokens"), _count(row, "output_tokens")
            if not num_prompt or not num_output:
                continue  # refused, or nothing but counted
            ended_s = datetime.fromisoformat(row["time"]).timestamp()
            arrived_s = ended_s - _within(row["duration_ms"], 1e12) / 1e3
            choices = int(_within(row.get("num_choices", 1), 1024)) or 1
            name = str(row["model"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"trace {path}, line {number}: {error}: wanted time, duration_ms, model, "
                "prompt_tokens and output_tokens, as a router logs them"
            ) from None
        for _ in range(choices):
            yield name, TraceRequest(arrived_s, num_prompt, -(-num_output // choices))


def _count(row: dict[str, Any], name: str) -> int:
    """Return a number of tokens; 0 where there is none."""
    found = row.get(name)
    return found if type(found) is int and 0 < found < 1 << 24 else 0


def _within(value: object, most: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{value!r} is none of its values")
    return float(value)  # type: ignore[arg-type]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
