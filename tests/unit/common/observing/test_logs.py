"""Log lines: fields, bounds, and text from outside that cannot forge a line."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from common.ids import AttemptId
from common.observing.logs import MAX_MESSAGE_CHARS, log_fields, name_node, set_up_logs
from pdserve.configuration.options import all_options

log = logging.getLogger("pdserve.test")

FORGERIES = [
    "x\n2026-01-01 00:00:00,000 ERROR pdserve: forged",
    "x\r\nforged",
    "x\x1b[2Jforged",
    "x\x85forged",
    "x\u2028forged",
    "x\x0bforged",
    "x\x00\x7f\x9bforged",
    "x\u202eforged",
    "x\ud800forged",
]

FORMATS = all_options()["log_format"].declared.one_of


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("pdserve")
    before = (root.handlers[:], root.level, own.level, sys.excepthook, threading.excepthook)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])
    sys.excepthook, threading.excepthook = before[3], before[4]
    logging.captureWarnings(False)


def set_up(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    set_up_logs(level, log_format, role="router", node_id="r1", stream=stream)
    return stream


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_human_line() -> None:
    stream = set_up("human")
    log.info("it %s", "works", extra=log_fields(AttemptId("req-1", 2), nodes=["p", "d"], n=None))
    date, time, *rest = stream.getvalue().split(" ")
    assert (len(date), len(time)) == (10, 12)
    assert " ".join(rest) == "INFO pdserve.test: it works choice_id=req-1 attempt=2 nodes=p,d\n"


def test_a_value_with_spaces_is_quoted() -> None:
    stream = set_up("human")
    log.info("it", extra=log_fields(reason='the "best" of a=b', empty=""))
    assert stream.getvalue().endswith('it reason="the \\"best\\" of a=b" empty=""\n')


def test_a_json_line() -> None:
    stream = set_up("json")
    log.warning(
        "it %s", "works", extra=log_fields(AttemptId("req-1", 2), ttft_ms=1.5, missing=None)
    )
    (line,) = json_lines(stream)
    time = line.pop("time")
    assert (len(time), time[10], time[-5], time[-1]) == (24, "T", ".", "Z")
    assert line == {
        "level": "warning",
        "logger": "pdserve.test",
        "message": "it works",
        "role": "router",
        "node_id": "r1",
        "choice_id": "req-1",
        "attempt": 2,
        "ttft_ms": 1.5,
    }


def test_a_field_cannot_pose_as_the_line_s_own() -> None:
    stream = set_up("json")
    log.info("true", extra=log_fields(message="false", level="false", time="false"))
    (line,) = json_lines(stream)
    assert (line["message"], line["level"]) == ("true", "info")
    assert line["time"] != "false"


def test_a_node_learns_its_name_late() -> None:
    stream = set_up("json")
    name_node("decode-7")
    log.info("x")
    assert json_lines(stream)[0]["node_id"] == "decode-7"


@pytest.mark.parametrize("log_format", FORMATS)
@pytest.mark.parametrize("text", FORGERIES)
def test_foreign_text_stays_in_its_line(text: str, log_format: str) -> None:
    stream = set_up(log_format)
    log.info("%s", text, extra=log_fields(field=text, texts=[text]))
    written = stream.getvalue()
    assert written.endswith("\n")
    assert written[:-1].isprintable()
    assert len(written.splitlines()) == 1


def fail(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("text", FORGERIES)
def test_a_traceback_cannot_begin_a_line(text: str) -> None:
    stream = set_up("human")
    try:
        fail(text)
    except ValueError:
        log.exception("failed")
    first, *rest = stream.getvalue().split("\n")[:-1]
    assert first.endswith("ERROR pdserve.test: failed")
    assert rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_an_exception_is_one_field_and_its_end_is_kept() -> None:
    stream = set_up("json")
    try:
        fail("\n".join(f"line {i}" for i in range(5000)))
    except ValueError:
        log.exception("failed")
    (line,) = json_lines(stream)
    assert line["exception"].endswith("line 4999")
    assert len(line["exception"]) < 20_000


@pytest.mark.parametrize("log_format", FORMATS)
def test_a_line_is_bounded(log_format: str) -> None:
    stream = set_up(log_format)
    log.info("x" * 10**6, extra=log_fields(field="y" * 10**6))
    written = stream.getvalue()
    assert "x" * MAX_MESSAGE_CHARS in written
    assert len(written) < 2 * MAX_MESSAGE_CHARS
    assert "more characters" in written


def test_libraries_say_nothing_below_info() -> None:
    stream = set_up("human", "debug")
    log.debug("ours")
    logging.getLogger("hpack").debug("authorization: Bearer key")
    logging.getLogger("some.library").info("theirs")
    text = stream.getvalue()
    assert "ours" in text
    assert "theirs" in text
    assert "Bearer" not in text


def test_the_level_holds_for_all() -> None:
    stream = set_up("human", "warning")
    log.info("no")
    logging.getLogger("some.library").info("no")
    log.warning("yes")
    assert "no" not in stream.getvalue()
    assert "yes" in stream.getvalue()


def test_a_second_set_up_replaces_the_first() -> None:
    first = set_up("human")
    second = set_up("json")
    log.info("x")
    assert first.getvalue() == ""
    assert len(json_lines(second)) == 1


def test_what_nobody_caught_and_warnings_are_lines_as_well() -> None:
    stream = set_up("json")
    try:
        fail("nobody")
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    thread = threading.Thread(target=fail, args=("in a thread",), name="worker")
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    uncaught, in_thread, warned = json_lines(stream)
    assert (uncaught["level"], "nobody" in uncaught["exception"]) == ("critical", True)
    assert in_thread["message"].endswith("ended worker")
    assert "in a thread" in in_thread["exception"]
    assert (warned["logger"], "old" in warned["message"]) == ("py.warnings", True)
