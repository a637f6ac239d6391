"""The client side of one request: streams that end well, badly, or not at all."""

from __future__ import annotations

import json
import shlex
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.commands.answer_stream import CHAT, COMPLETION, served_model
from pdserve.commands.http_client import RouterRefused, RouterUnreachable, fetch_json
from pdserve.local_cluster.sample_answer import (
    SampleAnswer,
    curl_command,
    show_sample_answer,
    stream_sample_answer,
)
from tests.support.clocks.manual_clock import ManualClock

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@contextmanager
def answering(*replies: bytes) -> Iterator[str]:
    """A server that sends a reply to each who connects, in turn, whatever they ask."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(reply)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join()


def ask(url: str, pieces: list[str]) -> SampleAnswer:
    return stream_sample_answer(
        url, model="m", api_key="", clock=ManualClock(), write=pieces.append
    )


def show(url: str, pieces: list[str]) -> bool:
    return show_sample_answer(
        url, api_key="", clock=ManualClock(), started_at_s=0.0, write=pieces.append
    )


def test_text_is_passed_on_as_it_comes() -> None:
    events = (
        b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
        b": a comment\n\n"
        b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "b"}}], "usage": null}\n\n'
        b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
        b"data: [DONE]\n\n"
    )
    pieces: list[str] = []
    with answering(OK + events) as url:
        answer = ask(url, pieces)
    assert pieces == ["a", "b"]
    assert (answer.text, answer.num_tokens) == ("ab", 2)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (b"", "the stream ended before"),
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "the stream ended before"),
        (b'data: {"error": {"message": "node lost"}}\n\n', "node lost"),
        (b'data: {"error": "gone"}\n\n', "gone"),
        (b"data: 1\n\n", "an event is not an object"),
    ],
)
def test_a_stream_that_is_no_answer(events: bytes, error: str) -> None:
    with answering(OK + events) as url, pytest.raises(RouterRefused, match=error):
        ask(url, [])


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (
            b'HTTP/1.1 503 X\r\nConnection: close\r\n\r\n{"error": {"message": "no decoders"}}',
            "503 no decoders",
        ),
        (b"HTTP/1.1 404 X\r\nContent-Length: 2\r\n\r\n[]", "404 Not Found"),
        (
            b"HTTP/1.1 401 X\r\nContent-Length: 1\r\n\r\nx",
            "401 Unauthorized .--api-key-file, or",
        ),
    ],
)
def test_a_refusal_is_told_in_the_routers_words(reply: bytes, error: str) -> None:
    with answering(reply) as url, pytest.raises(RouterRefused, match=error):
        served_model(url, api_key="")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", "Remote end closed connection"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH"),
        (OK + b"<html>", "the answer is not JSON"),
    ],
)
def test_what_is_no_router_is_told_apart(reply: bytes, error: str) -> None:
    with answering(reply) as url, pytest.raises(RouterUnreachable, match=error):
        fetch_json(url, "/v1/models")


def test_silence_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RouterUnreachable, match=r"no answer within 0\.05 s"):
            fetch_json(url, "/v1/models", timeout_s=0.05)


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:x", "http://h/v1"])
def test_a_url_of_another_shape_is_refused(url: str) -> None:
    with pytest.raises(RouterUnreachable, match="wanted http://host:port"):
        fetch_json(url, "/v1/models")


def test_a_url_needs_no_scheme() -> None:
    with answering(OK + b'{"data": [{"id": "m"}]}') as url:
        assert served_model(url.removeprefix("http://"), api_key="") == "m"


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(RouterUnreachable, match="an HTTP header cannot carry"):
        fetch_json("http://127.0.0.1:1", "/v1/models", api_key="a\nb")


def test_reasoning_is_shown_as_such() -> None:
    events = (
        b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
        b'data: {"choices": [{"delta": {"reasoning_content": "m"}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "Paris"}}]}\n\n'
        b"data: [DONE]\n\n"
    )
    pieces: list[str] = []
    with answering(OK + events) as url:
        answer = ask(url, pieces)
    assert "".join(pieces) == "[reasoning] hmm\n[answer] Paris"
    assert (answer.reasoning, answer.text, answer.path) == ("hmm", "Paris", CHAT)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n', "are reasoning"),
        (b'data: {"choices": [{"delta": null, "finish_reason": "stop"}]}\n\n', "no text: 0 tok"),
        (b"", "no text: 0 tok"),
    ],
)
def test_an_answer_without_text_is_one(events: bytes, words: str) -> None:
    models = OK + b'{"data": [{"id": "m"}]}'
    pieces: list[str] = []
    with answering(models, OK + events + b"data: [DONE]\n\n") as url:
        assert show(url, pieces)
    assert words in "".join(pieces)
    assert "curl" in "".join(pieces)


def test_a_model_that_cannot_chat_is_asked_for_a_completion() -> None:
    refusal = b'HTTP/1.1 400 X\r\nConnection: close\r\n\r\n{"error": {"message": "no template"}}'
    events = b'data: {"choices": [{"text": "Paris"}]}\n\ndata: [DONE]\n\n'
    pieces: list[str] = []
    models = OK + b'{"data": [{"id": "m"}]}'
    with answering(models, refusal, OK + events) as url:
        assert show(url, pieces)
    shown = "".join(pieces)
    assert "no template]\n[completion] Paris" in shown
    assert f"curl -N {url}{COMPLETION} " in shown
    assert '"prompt"' in shown


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", "Remote end closed connection"),
        (b"HTTP/1.1 500 X\r\nConnection: close\r\n\r\n{}", "500 Internal Server Error"),
        (OK + b'data: {"error": {"message": "node lost"}}\n\n', "node lost"),
        (OK, "the stream ended before"),
    ],
)
def test_what_goes_wrong_is_told(reply: bytes, error: str) -> None:
    pieces: list[str] = []
    with answering(OK + b'{"data": [{"id": "m"}]}', reply) as url:
        assert not show(url, pieces)
    assert error in "".join(pieces)
    pieces.clear()
    with answering(OK + b'{"data": []}') as url:
        assert not show(url, pieces)
    assert "names no model" in "".join(pieces)


def test_the_curl_command_can_be_pasted() -> None:
    for path in (CHAT, COMPLETION):
        command = shlex.split(curl_command("http://h:1", model="it's", needs_key=True, path=path))
        body = json.loads(command[-1])
        assert (body["model"], command[2]) == ("it's", f"http://h:1{path}")
    assert "Authorization" not in curl_command("http://h:1", model="m", needs_key=False)
    assert "-H 'Authorization: Bearer YOUR-KEY'" in curl_command(
        "http://h:1", model="m", needs_key=True
    )
