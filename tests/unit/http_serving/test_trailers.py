"""Fields behind a chunked body are no headers of its request, or of the next one."""

from __future__ import annotations

import pytest

from tests.support.http.echo import exchange

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nX: 1\r\n"
TRAILERS = b"X-Api-Key: stolen\r\nX: 2\r\nContent-Encoding: gzip\r\nExpect: 100-continue\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n" + TRAILERS + b"\r\n"
HEADERS = {"host": "a", "x": "1", "transfer-encoding": "chunked"}
OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_trailers_are_no_headers(size: int) -> None:
    data = HEAD + CHUNKED + b"GET /next HTTP/1.1\r\nHost: b\r\n\r\n"
    segments = [data[first : first + size] for first in range(0, len(data), size)]
    first, second = await exchange(*segments, num_answers=2)
    assert (first["headers"], first["body"]) == (HEADERS, "ab")
    assert (second["headers"], second["path"]) == ({"host": "b"}, "/next")


async def test_nor_are_they_behind_an_offer() -> None:
    (asked,) = await exchange(HEAD + OFFER + CHUNKED)
    assert (asked["headers"], asked["body"]) == (HEADERS | {"connection": "Upgrade"}, "ab")
