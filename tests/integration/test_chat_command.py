"""`pdserve chat` as a process, in a terminal and through pipes; a stand-in is its router."""

from __future__ import annotations

import codecs
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdserve.local_cluster.child_process import ending_with_parent

COMMAND = [sys.executable, "-m", "pdserve", "chat", "--url"]
WAIT_S = 60


class StandIn(BaseHTTPRequestHandler):
    """Answers "Hello world"; asked "hang", it says "Hello " and waits for its client to leave."""

    bodies: list[dict[str, Any]]
    keys: list[str | None]
    left: threading.Event

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "tiny"}]}).encode(), 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        self.keys.append(self.headers["Authorization"])
        asked = body["messages"][-1]["content"]
        if asked == "fail":
            self._send(b'{"error": {"message": "the cluster is full"}}', 503)
            return
        self.send_response(200)
        self.end_headers()
        texts = ["\x1b[2J\u9b31"] if asked == "escape" else ["Hello ", "world"]
        for text in texts[:1] if asked == "hang" else texts:
            self._event({"content": text})
        if asked == "hang":
            self.rfile.read(1)  # ends when the client is gone
            self.left.set()
            return
        if asked == "think":
            self._event({"reasoning_content": "hm"})
        self.wfile.write(b": a ping\n\ndata: [DONE]\n\n")

    def _event(self, delta: dict[str, str]) -> None:
        self.wfile.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
        self.wfile.flush()

    def _send(self, content: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        pass


@pytest.fixture
def router() -> Iterator[tuple[str, type[StandIn]]]:
    class Fresh(StandIn):
        pass

    Fresh.bodies, Fresh.keys, Fresh.left = [], [], threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Fresh) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Fresh
        server.shutdown()
        thread.join()


def piped(url: str, text: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, url, *flags],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=WAIT_S,
        check=False,
    )


def test_a_pipe_gets_the_answer_alone(router: tuple[str, type[StandIn]]) -> None:
    url, seen = router
    done = piped(url, "hi\nthere\n", PDSERVE_API_KEY="from-a-variable")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello world\n", "")
    done = piped(url, "think", "--model", "other", "--api-key", "by-flag")
    assert (done.returncode, done.stdout) == (0, "Hello world\n")
    assert [body["model"] for body in seen.bodies] == ["tiny", "other"]
    assert seen.bodies[0]["messages"] == [{"role": "user", "content": "hi\nthere"}]
    assert seen.keys == ["Bearer from-a-variable", "Bearer by-flag"]


def test_a_pipe_without_an_answer_fails(router: tuple[str, type[StandIn]]) -> None:
    url, _ = router
    for text, code, words in (
        ("fail", 1, "503 the cluster is full"),
        ("", 2, "the input is empty: wanted a message"),
        (" \n", 2, "the input is empty"),
    ):
        done = piped(url, text)
        assert (done.returncode, done.stdout) == (code, "")
        assert words in done.stderr
    done = piped("http://127.0.0.1:1", "hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing listens there" in done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_pipe_that_is_no_text_is_refused(router: tuple[str, type[StandIn]], locale: str) -> None:
    url, seen = router
    done = subprocess.run(
        [*COMMAND, url],
        input=b"caf\xe9",
        capture_output=True,
        env={**os.environ, "LC_ALL": locale},
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == b"pdserve: the input is not UTF-8 text\n"
    assert not seen.bodies


class Terminal:
    """A `pdserve chat` with a terminal, and what is on it."""

    def __init__(self, process: subprocess.Popen[bytes], side: int) -> None:
        self.process = process
        self._side = side
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.shown = ""
        self._num_read = 0

    def type(self, text: str | bytes) -> None:
        os.write(self._side, text.encode() if isinstance(text, str) else text)

    def read_until(self, text: str) -> None:
        """Return when `text` has come behind what was read until before."""
        while (place := self.shown.find(text, self._num_read)) < 0:
            self.shown += self._decode(os.read(self._side, 65536))
        self._num_read = place + len(text)

    def interrupt_at_prompt(self) -> None:
        """Send Ctrl-C once it waits for a line: readline keeps back one that comes before that."""
        self.read_until("> ")
        state = Path(f"/proc/{self.process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "S":
            os.sched_yield()
        self.process.send_signal(signal.SIGINT)


@contextmanager
def terminal(url: str, **more: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "dumb", "PYTHONIOENCODING": "utf-8", **more}
    process = subprocess.Popen(
        ending_with_parent([*COMMAND, url]), stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_conversation(router: tuple[str, type[StandIn]]) -> None:
    url, seen = router
    with terminal(url) as chat:
        chat.read_until("> ")
        assert "tiny: /exit or Ctrl-D ends" in chat.shown
        for question in ("hi", "fail", "hang"):
            chat.type(f"{question}\n")
            if question == "hang":
                chat.read_until("Hello ")
                for _ in range(9):  # a person who is in a hurry
                    chat.process.send_signal(signal.SIGINT)
                chat.read_until("[cut off]")
                assert seen.left.wait(WAIT_S), "the router is not told"
            chat.read_until("> ")
        assert "pdserve: http" in chat.shown
        assert "the cluster is full" in chat.shown
        chat.type("\n")
        chat.interrupt_at_prompt()  # without an answer to cut off
        chat.read_until("> ")
        chat.type("escape\n")
        chat.read_until("> ")
        assert "\x1b" not in chat.shown
        assert "\N{REPLACEMENT CHARACTER}[2J\u9b31" in chat.shown
        chat.type("/exit\n")
        assert chat.process.wait(WAIT_S) == 0
    said = [(m["role"], m["content"]) for m in seen.bodies[-1]["messages"]]
    assert said == [
        ("user", "hi"),
        ("assistant", "Hello world"),
        ("user", "hang"),
        ("assistant", "Hello "),
        ("user", "escape"),
    ]


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])
def test_a_line_that_is_no_text_is_not_sent(
    router: tuple[str, type[StandIn]], handler: str
) -> None:
    """Without a locale Python takes other bytes for halves of characters."""
    url, seen = router
    with terminal(url, PYTHONIOENCODING=f"utf-8:{handler}") as chat:
        chat.read_until("> ")
        chat.type(b"caf\xff\n")
        chat.read_until("pdserve: the line is not UTF-8 text")
        chat.read_until("> ")
        chat.type("hi\n")
        chat.read_until("Hello world")
    assert [body["messages"][-1]["content"] for body in seen.bodies] == ["hi"]


def test_the_end_of_the_input_ends_it(router: tuple[str, type[StandIn]]) -> None:
    with terminal(router[0]) as chat:
        chat.read_until("> ")
        chat.type("\x04")
        assert chat.process.wait(WAIT_S) == 0


def test_reasoning_is_marked(router: tuple[str, type[StandIn]]) -> None:
    with terminal(router[0]) as chat:
        chat.read_until("> ")
        chat.type("think\n")
        chat.read_until("[reasoning] hm")
