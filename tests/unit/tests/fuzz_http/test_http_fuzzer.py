"""The HTTP fuzzer itself: what it sends can be sent again, and it sees what is wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz_http.answers import Answer, fault_of, send
from tests.fuzz_http.cases import Case, Ending, make_case, read_cases, write_cases

NUM_CASES = 300
JSON = {b"content-type": b"application/json"}
EVENTS = {b"content-type": b"text/event-stream"}
ERROR = b'{"error":{"message":"no","type":"t","param":null,"code":"c"}}'
CHUNK = b'data: {"object":"text_completion","choices":[]}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_seed_and_a_number_give_the_same_case() -> None:
    cases = [make_case(7, number) for number in range(NUM_CASES)]
    assert cases == [make_case(7, number) for number in range(NUM_CASES)]
    assert cases != [make_case(8, number) for number in range(NUM_CASES)]
    kinds = {case.kind.split()[0] for case in cases}
    assert kinds == {
        *("body", "route", "target", "headers", "pipelined", "chunked", "broken", "left"),
    }


def test_kept_cases_are_the_same_bytes(tmp_path: Path) -> None:
    cases = [make_case(7, number) for number in range(NUM_CASES)]
    write_cases(tmp_path / "cases.json", 7, "a fault", cases)
    assert read_cases(tmp_path / "cases.json") == cases


def test_half_of_the_bodies_are_json_that_any_parser_reads() -> None:
    bodies = [case for case in (make_case(1, n) for n in range(NUM_CASES)) if "body" in case.kind]
    num_valid = 0
    for case in bodies:
        try:
            json.loads(b"".join(case.parts).partition(b"\r\n\r\n")[2])
        except (ValueError, RecursionError):
            continue
        num_valid += 1
    assert num_valid > len(bodies) // 2


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (200, JSON, b"{}"),
        (200, {}, b""),
        (204, {}, b""),
        (400, JSON, ERROR),
        (431, {b"content-type": b"text/plain"}, b"The head is too large."),
        (503, JSON | {b"retry-after": b"1"}, ERROR),
        (504, JSON, ERROR),
        (200, EVENTS, CHUNK + DONE),
        (200, EVENTS, b"event: message_stop\ndata: {}\n\n"),
    ],
)
def test_right_answers(status: int, headers: dict[bytes, bytes], body: bytes) -> None:
    assert fault_of(Answer("POST", status, headers, body, is_whole=True)) == ""


@pytest.mark.parametrize(
    ("status", "headers", "body", "fault"),
    [
        (500, JSON, ERROR, "status 500"),
        (502, JSON, ERROR, "status 502"),
        (307, JSON, ERROR, "status 307"),
        (200, JSON, b'{"a":NaN}', "no valid JSON: NaN"),
        (200, JSON, b'{"a":', "no valid JSON"),
        (200, JSON, b'"\xff"', "no valid JSON"),
        (404, JSON, b"", "status 404 without a sentence"),
        (400, JSON, b'{"error":{"message":""}}', "status 400 without a message"),
        (400, JSON, ERROR.replace(b'"c"', b'"internal_error"'), "an internal error"),
        (503, JSON, ERROR, "without retry-after"),
        (200, EVENTS, b"", "a stream without events"),
        (200, EVENTS, CHUNK, "a stream without its end"),
        (200, EVENTS, b"data: {\n\n" + DONE, "an event of a stream: no valid JSON"),
        (200, EVENTS, CHUNK + b'data: {"error":{"code":"internal_error"}}\n\n' + DONE, "ends with"),
    ],
)
def test_wrong_answers(status: int, headers: dict[bytes, bytes], body: bytes, fault: str) -> None:
    assert fault in fault_of(Answer("POST", status, headers, body, is_whole=True))


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Reads a little of one connection, says `answer` and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LAST = b"HTTP/1.1 404 No\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"


@pytest.mark.parametrize(
    ("answer", "methods", "statuses"),
    [
        (OK, ("GET",), [200]),
        (OK + OK, ("GET", "GET"), [200, 200]),
        (OK + LAST, ("GET", "GET", "GET"), [200, 404]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n" + OK, ("HEAD", "GET"), [200, 200]),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, ("GET",), [200]),
        (CHUNKED + b"0\r\n\r\n", ("GET",), [200]),
        (b"", (), []),
        (OK, (), [200]),
    ],
)
def test_answers_that_are_read(
    answer: bytes, methods: tuple[str, ...], statuses: list[int]
) -> None:
    with server(answer) as port:
        outcome = send(port, Case(0, "a case", (b"GET",), methods, Ending.READ))
    assert outcome.fault == ""
    assert [one.status for one in outcome.answers] == statuses


@pytest.mark.parametrize(
    ("answer", "methods", "fault"),
    [
        (b"", ("GET",), "closed before 1 answers"),
        (OK, ("GET", "GET"), "closed before 1 answers"),
        (OK[:-1], ("GET",), "no valid HTTP"),
        (CHUNKED, ("GET",), "no valid HTTP"),
        (CHUNKED + OK, ("GET",), "no valid HTTP"),
        (b"nonsense\r\n\r\n", ("GET",), "no valid HTTP"),
        (b"nonsense\r\n\r\n", (), "no valid HTTP"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", (), "status 500"),
    ],
)
def test_answers_that_are_wrong(answer: bytes, methods: tuple[str, ...], fault: str) -> None:
    with server(answer) as port:
        outcome = send(port, Case(0, "a case", (b"GET",), methods, Ending.READ))
    assert fault in outcome.fault
