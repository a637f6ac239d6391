"""Log lines, one per event: as text for people, or as JSON for machines.

A line about a choice has the fields `choice_id` and `attempt`, made by `log_fields`. Text from
outside can neither begin a line nor move a cursor: characters that do not print are escaped, and
every line of a traceback is indented. The length of a line is bounded.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from common.ids import AttemptId
from common.observing.log_output import LogOutput

MAX_MESSAGE_CHARS = 4096
MAX_FIELD_CHARS = 512
MAX_TRACEBACK_CHARS = 16384
_OWN = "pdserve"

log = logging.getLogger(_OWN)


def log_fields(attempt: AttemptId | None = None, /, **fields: object) -> dict[str, Any]:
    """Return the `extra` of a logging call: fields beside the message, without those that are None.

    Values are numbers, texts or short lists of texts.
    """
    if attempt is not None:
        fields = {"choice_id": attempt.choice_id, "attempt": attempt.attempt, **fields}
    return {"fields": fields}


def set_up_logs(
    level: str, log_format: str, *, role: str, node_id: str, stream: TextIO | None = None
) -> None:
    """Send the lines of every logger to `stream` (stderr). Call it once, before anything is logged.

    `level` is for pdserve's own loggers. Those of libraries log nothing below INFO, because their
    debug lines contain headers and commands, and these contain secrets.
    """
    handler = logging.StreamHandler(stream) if stream else LogOutput(sys.stderr.fileno())
    handler.setFormatter(JsonLines(role, node_id) if log_format == "json" else HumanLines())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(logging.getLevelName(level.upper()), logging.INFO))
    logging.getLogger(_OWN).setLevel(level.upper())
    logging.captureWarnings(True)
    # No line shows these values, and finding them takes longer than writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def flush_logs() -> None:
    """Wait until what was logged is written, though not for a reader that stands still."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def name_node(node_id: str) -> None:
    """Put this `node_id` into all further JSON lines: a node gets its id only when it listens."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines):
            handler.formatter.node_id = node_id


def name_role(role: str) -> None:
    """Put this role into all further JSON lines: that of a node may change."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines):
            handler.formatter.role = role


class HumanLines(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO pdserve.router: text key=value`, tracebacks indented below."""

    def __init__(self) -> None:
        super().__init__()
        self._second = ""
        self._second_s = -1

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Return date and time. The text is made once per second, because there are many lines."""
        second_s = int(record.created)
        if second_s != self._second_s:
            self._second_s = second_s
            self._second = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second_s))
        return f"{self._second},{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{self.formatTime(record)} {record.levelname} {one_line(record.name)}: "
            f"{one_line(_message(record))}"
        )
        for key, value in getattr(record, "fields", {}).items():
            if value is not None:
                line += f" {key}={_human_value(value)}"
        trouble = _traceback(self, record)
        return line + "".join(f"\n  {one_line(part)}" for part in trouble.splitlines())


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, `role`,
    `node_id`, the record's own fields, and `exception` with the traceback."""

    def __init__(self, role: str, node_id: str = "") -> None:
        super().__init__()
        self.role = role
        self.node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            **_fields(record),
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            "role": self.role,
            "node_id": self.node_id,
        }
        trouble = _traceback(self, record)
        if trouble:
            line["exception"] = trouble
        # Only printable ASCII, so that no character of the text can end or hide a line.
        return json.dumps(_in_order(line), default=str, ensure_ascii=True)


def one_line(text: str) -> str:
    """Return `text` with all characters that do not print escaped as in a Python literal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


_FIRST = ("time", "level", "logger", "message", "role", "node_id")


def _in_order(line: Mapping[str, object]) -> dict[str, object]:
    return {key: line[key] for key in _FIRST} | {k: v for k, v in line.items() if k not in _FIRST}


def _rfc3339(at_s: float) -> str:
    at_ms = int(at_s * 1000)
    seconds, milliseconds = divmod(at_ms, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"


def _message(record: logging.LogRecord) -> str:
    return _cut(record.getMessage(), MAX_MESSAGE_CHARS)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return {key: _bounded(value) for key, value in fields.items() if value is not None}


def _bounded(value: object) -> object:
    if isinstance(value, str):
        return _cut(value, MAX_FIELD_CHARS)
    if isinstance(value, list | tuple):
        return [_cut(str(part), MAX_FIELD_CHARS) for part in value]
    return value


_SEPARATORS = frozenset(' ="')
_is_plain = re.compile(rf"[!#-<>-~]{{1,{MAX_FIELD_CHARS}}}").fullmatch
"""Finds most texts to be short ASCII without separators, in one call."""


def _human_value(value: object) -> str:
    if isinstance(value, str) and _is_plain(value):
        return value
    if isinstance(value, int | float):
        return str(value)
    value = _bounded(value)
    text = ",".join(value) if isinstance(value, list) else str(value)
    # Quoted when the text could be taken for the next field.
    plain = text and text.isprintable() and _SEPARATORS.isdisjoint(text)
    return text if plain else json.dumps(one_line(text), ensure_ascii=False)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Return the traceback, or the end of a long one, which has the error."""
    if record.exc_info and record.exc_info[0] is not None:
        text = formatter.formatException(record.exc_info)
    else:
        text = record.exc_text or ""
    return text if len(text) <= MAX_TRACEBACK_CHARS else "…" + text[-MAX_TRACEBACK_CHARS:]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("an uncaught error", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "a thread that has ended"
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        log.critical(
            "an uncaught error ended %s",
            name,
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )
