"""Sends a case, reads what it is answered, and says what is wrong with that."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import h11

from tests.fuzz_http.cases import Case, Ending

ANSWER_S = 45.0
"""Beyond the time that the router gives a request, 30 s."""
PATIENCE_S = 1.0
"""For an answer that need not come."""
BETWEEN_PARTS_S = 0.02
_CONNECT_S = 10.0
_READ_BYTES = 1 << 16
_WITHOUT_SENTENCE = frozenset({204, 304})
_UNAVAILABLE = frozenset({503, 504})
"""A limit of places or of time: each says which one."""


@dataclass(slots=True)
class Answer:
    """One HTTP answer."""

    method: str
    status: int
    headers: dict[bytes, bytes]
    body: bytes = b""
    is_whole: bool = False


@dataclass(slots=True)
class Outcome:
    """The answers of a case, and what is wrong with them; nothing is when `fault` is empty."""

    fault: str = ""
    answers: list[Answer] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0


def send(port: int, case: Case, source: str = "127.0.0.1") -> Outcome:
    """Send a case from an address of this machine, and judge its answers."""
    outcome = Outcome(began_s=time.monotonic())
    try:
        with socket.create_connection(
            ("127.0.0.1", port), _CONNECT_S, source_address=(source, 0)
        ) as connection:
            _exchange(connection, case, outcome)
    except TimeoutError:
        if case.methods:
            outcome.fault = f"no whole answer within {ANSWER_S:.0f} s"
    except (ConnectionResetError, BrokenPipeError) as error:
        missing = len(case.methods) - sum(answer.is_whole for answer in outcome.answers)
        if missing > 0:
            outcome.fault = f"{type(error).__name__} before {missing} answers"
    except h11.RemoteProtocolError as error:
        outcome.fault = f"no valid HTTP: {error}"
    except OSError as error:
        outcome.fault = f"{type(error).__name__}: {error}"
    outcome.ended_s = time.monotonic()
    if not outcome.fault:
        found = (fault_of(answer) for answer in outcome.answers)
        outcome.fault = next((fault for fault in found if fault), "")
    return outcome


def _exchange(connection: socket.socket, case: Case, outcome: Outcome) -> None:
    for number, part in enumerate(case.parts):
        if number:
            time.sleep(BETWEEN_PARTS_S)
        # A server may close before it has read all, and its answer is there all the same.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(part)
    if case.ending is Ending.LEAVE:
        return
    if case.ending is Ending.HALF_CLOSE:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    ends_s = time.monotonic() + (ANSWER_S if case.methods else PATIENCE_S)
    data, is_open = b"", True
    expected = iter(case.methods)
    while is_open:
        method = next(expected, "" if case.methods or outcome.answers else case.first_method)
        if case.methods and not method:
            return
        data, is_open = _read_one(connection, data, method or "GET", ends_s, outcome)
    if case.methods and not _is_told_to_close(outcome):
        missing = len(case.methods) - sum(answer.is_whole for answer in outcome.answers)
        if missing > 0:
            outcome.fault = f"closed before {missing} answers"


def _read_one(
    connection: socket.socket, data: bytes, method: str, ends_s: float, outcome: Outcome
) -> tuple[bytes, bool]:
    """Read one answer. Return what came behind it, and whether more can come.

    Raises `h11.RemoteProtocolError` for what is no answer, `TimeoutError` when its time is over.
    """
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method=method, target="/", headers=[("Host", "localhost")]))
    reader.send(h11.EndOfMessage())
    if data:
        reader.receive_data(data)
    answer: Answer | None = None
    body: list[bytes] = []
    while True:
        event: Any = reader.next_event()
        if event is h11.NEED_DATA:
            connection.settimeout(max(0.001, ends_s - time.monotonic()))
            received = connection.recv(_READ_BYTES)
            if not received and answer is None and not reader.trailing_data[0]:
                return b"", False
            reader.receive_data(received)
        elif isinstance(event, h11.Response):
            answer = Answer(method, event.status_code, dict(event.headers))
            outcome.answers.append(answer)
        elif isinstance(event, h11.Data):
            body.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            assert answer is not None
            answer.body, answer.is_whole = b"".join(body), True
            return reader.trailing_data[0], reader.their_state is h11.DONE
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return b"", False


def _is_told_to_close(outcome: Outcome) -> bool:
    """Return whether the latest answer is whole and says that it is the last one."""
    if not outcome.answers:
        return False
    latest = outcome.answers[-1]
    return latest.is_whole and latest.headers.get(b"connection", b"").lower() == b"close"


def fault_of(answer: Answer) -> str:
    """Return what is wrong with an answer; empty when nothing is."""
    status, kind = answer.status, answer.headers.get(b"content-type", b"").decode("latin-1")
    if not (200 <= status < 300 or 400 <= status < 500 or status in _UNAVAILABLE):
        return f"status {status}: {answer.body[:300]!r}"
    if not answer.is_whole or answer.method == "HEAD" or status in _WITHOUT_SENTENCE:
        return ""
    if status >= 400:
        return _fault_of_error(answer, kind)
    if kind.startswith("application/json"):
        return _json_fault(answer.body)
    if kind.startswith("text/event-stream"):
        return _fault_of_stream(answer.body)
    return ""


def _fault_of_error(answer: Answer, kind: str) -> str:
    if not answer.body.strip():
        return f"status {answer.status} without a sentence"
    if kind.startswith("application/json"):
        if fault := _json_fault(answer.body):
            return fault
        error = json.loads(answer.body).get("error")
        if not isinstance(error, dict) or not error.get("message"):
            return f"status {answer.status} without a message: {answer.body[:300]!r}"
        if error.get("code") == "internal_error":
            return f"status {answer.status} with an internal error"
    if answer.status == 503 and b"retry-after" not in answer.headers:
        return "status 503 without retry-after"
    return ""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _json_fault(text: bytes) -> str:
    try:
        json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"no valid JSON: {error}: {text[:300]!r}"
    return ""


def _fault_of_stream(body: bytes) -> str:
    """Return what is wrong with the events of a stream that was read to its end."""
    datas = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not datas:
        return f"a stream without events: {body[:300]!r}"
    for data in datas:
        if data == b"[DONE]":
            continue
        if fault := _json_fault(data):
            return f"an event of a stream: {fault}"
        if b"internal_error" in data or b'"api_error"' in data:
            return f"a stream ends with an internal error: {data[:300]!r}"
    is_openai_stream = b'"object":"chat.completion.chunk"' in body or (
        b'"object":"text_completion"' in body
    )
    if is_openai_stream and datas[-1] != b"[DONE]":
        return f"a stream without its end: {body[-300:]!r}"
    return ""
