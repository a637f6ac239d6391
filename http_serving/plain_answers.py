"""Answers to requests of HTTP/1.0, which has no chunks: a body of unknown length ends with its
connection (RFC 9112, section 6.1)."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class PlainCycle(RequestResponseCycle):
    """uvicorn's answer to a request, without chunks."""

    async def send(self, message: Any) -> None:
        """Send a part of the answer; one without a length is as long as what was sent of it."""
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
        elif self.chunked_encoding is False and not self.expected_content_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def answer_plainly(cycle: RequestResponseCycle) -> None:
    """Make the answer one without chunks, and without `100 Continue`, before any of it is sent."""
    # uvicorn has no place to name another class of answers; the answer has not begun to run.
    cycle.__class__ = PlainCycle
    cycle.waiting_for_100_continue = False
