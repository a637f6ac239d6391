"""`pdserve chat`: a conversation with a running cluster, in the terminal or through a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import closing
from types import FrameType
from typing import Any, TextIO

from common.errors import ConfigError
from pdserve.commands.answer_stream import CHAT, answer_events, pieces, printable, served_model
from pdserve.commands.http_client import RouterRefused, RouterUnreachable

_ENDS = ("/exit", "/quit", "/bye")
_MOST_PIPED_CHARS = 10 << 20
_READ_TIMEOUT_S = 600.0
"""A router's own limit on a request, as it is by default."""

Write = Callable[[str], object]


class Chat:
    """A conversation: its messages so far, and the router that continues it."""

    def __init__(self, url: str, *, model: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._api_key = api_key
        self.messages: list[dict[str, Any]] = []

    def ask(self, text: str, write: Write, write_reasoning: Write) -> None:
        """Ask, and write the answer piece by piece.

        An answer that `KeyboardInterrupt` cuts off stays in the conversation as far as it came; a
        question without any answer does not. Raises `RouterUnreachable` or `RouterRefused`.
        """
        question = {"role": "user", "content": text}
        body = {"model": self._model, "messages": [*self.messages, question], "stream": True}
        answer = ""
        try:
            stream = answer_events(
                self._url, CHAT, body, api_key=self._api_key, timeout_s=_READ_TIMEOUT_S
            )
            with closing(stream) as events:
                for event in events:
                    for is_reasoning, piece in pieces(event):
                        answer += "" if is_reasoning else piece  # before it can be seen
                        (write_reasoning if is_reasoning else write)(piece)
        finally:
            if answer:
                self.messages += [question, {"role": "assistant", "content": answer}]


def run_chat(url: str, *, model: str, api_key: str) -> int:
    """Talk until the input ends; return the exit code, which is 1 for a pipe without an answer.

    `model` '' is the one that is served. Raises `RouterUnreachable` or `RouterRefused` where there
    is no router, and `ConfigError` for an input that is too long or no text.
    """
    is_piped = not (sys.stdin.isatty() and sys.stdout.isatty())
    text = _piped_text(sys.stdin) if is_piped else ""
    model = model or served_model(url, api_key=api_key)
    chat = Chat(url, model=model, api_key=api_key)
    if is_piped:
        return _answer_pipe(chat, text)
    _talk(chat, model)
    return 0


def _piped_text(source: TextIO) -> str:
    """Return all of the input, which is one message."""
    try:
        text = source.read(_MOST_PIPED_CHARS + 1).strip()
        text.encode()  # in the locales C and POSIX, other bytes are read as lone surrogates
    except UnicodeError:
        raise ConfigError("the input is not UTF-8 text") from None
    if not text or len(text) > _MOST_PIPED_CHARS:
        found = f"more than {_MOST_PIPED_CHARS} characters" if text else "empty"
        raise ConfigError(f"the input is {found}: wanted a message")
    return text


def _answer_pipe(chat: Chat, text: str) -> int:
    """Ask with one message, and write the answer alone to standard output."""
    chat.ask(text, _write_raw, lambda _: None)
    if not chat.messages:
        raise RouterRefused("the answer has no text")
    _write_raw("\n")
    return 0


def _talk(chat: Chat, model: str) -> None:
    _import_editing()
    print(f"{model}: /exit or Ctrl-D ends, Ctrl-C cuts an answer off")
    interruptible = _Interruptible()
    while True:
        try:
            with interruptible:
                text = _typed_line()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        except UnicodeError:
            print("pdserve: the line is not UTF-8 text", file=sys.stderr)
            continue
        if text in _ENDS:
            return
        if text:
            _answer(chat, text, interruptible)


def _typed_line() -> str:
    """Return a line of the terminal. Raises what `input` raises, and `UnicodeError`."""
    text = input("> ").strip()
    text.encode()  # as with a pipe
    return text


class _Interruptible:
    """Ctrl-C raises `KeyboardInterrupt` once inside the block, and does nothing outside of it.

    So a second Ctrl-C, which comes while the first one is dealt with, does not end the program.
    """

    def __init__(self) -> None:
        self._is_entered = False
        signal.signal(signal.SIGINT, self._on_signal)

    def __enter__(self) -> None:
        self._is_entered = True

    def __exit__(self, *_: object) -> None:
        self._is_entered = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_entered:
            self._is_entered = False
            raise KeyboardInterrupt


def _answer(chat: Chat, text: str, interruptible: _Interruptible) -> None:
    """Show the answer to one message, or why there is none; the conversation goes on."""
    thoughts: list[str] = []

    def write_reasoning(piece: str) -> None:
        _write_shown(piece if thoughts else f"[reasoning] {piece}")
        thoughts.append(piece)

    def write(piece: str) -> None:
        if thoughts:
            thoughts.clear()
            _write_shown("\n[answer] ")
        _write_shown(piece)

    try:
        with interruptible:
            chat.ask(text, write, write_reasoning)
        print()
    except KeyboardInterrupt:
        print("\n[cut off]")
    except (RouterRefused, RouterUnreachable) as error:
        print(f"\npdserve: {error}", file=sys.stderr)


def _write_shown(text: str) -> None:
    _write_raw(printable(text))


def _write_raw(text: str) -> None:
    print(text, end="", flush=True)


def _import_editing() -> None:
    """Let `input` edit its line and recall earlier ones, where Python was built with readline."""
    try:
        import readline  # noqa: F401 (its import is what changes `input`)
    except ImportError:
        return
