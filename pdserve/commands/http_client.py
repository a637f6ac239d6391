"""A small HTTP client for commands: the standard library, bounded in time and size."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from common.errors import PdserveError

_LARGEST_REPLY_BYTES = 16 << 20


class RouterUnreachable(PdserveError):
    """Nothing answers at the router's address, or the answer is not a router's."""

    code = "router_unreachable"


class RouterRefused(PdserveError):
    """The router answered with an error; `status` is HTTP's, 0 for one within a stream."""

    code = "router_refused"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def fetch_json(url: str, path: str, *, api_key: str = "", timeout_s: float = 5.0) -> Any:
    """Get `path` and decode its JSON. Raises `RouterUnreachable` or `RouterRefused`."""
    with opened(url, "GET", path, api_key=api_key, timeout_s=timeout_s) as response:
        return decoded(url, path, response.read(_LARGEST_REPLY_BYTES))


@contextmanager
def opened(
    url: str,
    method: str,
    path: str,
    *,
    body: object = None,
    api_key: str = "",
    timeout_s: float,
) -> Iterator[http.client.HTTPResponse]:
    """Send a request and yield its 200 response; `timeout_s` bounds every single read.

    Raises `RouterUnreachable`, or `RouterRefused` for another status.
    """
    connection = _connection(url, timeout_s)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    payload = None if body is None else json.dumps(body)
    if payload is not None:
        headers["Content-Type"] = "application/json"
    if not api_key.isascii() or not api_key.isprintable():
        raise RouterUnreachable("the API key has characters that an HTTP header cannot carry")
    try:
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(_LARGEST_REPLY_BYTES)
            reason = f"{response.status} {_reason(response.status, text)}"
            raise RouterRefused(f"{url}{path}: {reason}", response.status)
        yield response
    except TimeoutError:
        raise RouterUnreachable(f"{url}: no answer within {timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise RouterUnreachable(
            f"{url}: nothing listens there (is `pdserve up` or a router running?)"
        ) from None
    except (socket.gaierror, UnicodeError):  # the second for one that no name can be
        raise RouterUnreachable(f"{url}: no host has this name: wanted http://host:port") from None
    except ssl.SSLError as error:
        wanted = "a certificate that this machine trusts, or http://host:port"
        raise RouterUnreachable(f"{url}: TLS fails ({error.reason}): wanted {wanted}") from None
    except (OSError, http.client.HTTPException) as error:
        raise RouterUnreachable(f"{url}: {str(error) or type(error).__name__}") from None
    finally:
        connection.close()


def decoded(url: str, path: str, text: bytes | str) -> Any:
    """Decode JSON text of the router. Raises `RouterUnreachable` when it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RouterUnreachable(
            f"{url}{path}: the answer is not JSON: no pdserve router?"
        ) from None


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError
        is_tls = parts.scheme == "https"
        connection_class = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        return connection_class(parts.hostname, parts.port, timeout=timeout_s)
    except (ValueError, http.client.InvalidURL):
        raise RouterUnreachable(f"the URL is {url!r}: wanted http://host:port") from None


def _reason(status: int, text: bytes) -> str:
    """Return the message of an OpenAI-shaped error, else the status in words."""
    try:
        reason = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = http.client.responses.get(status, "unknown status")
    if status == http.client.UNAUTHORIZED:
        return f"{reason} (--api-key-file, or the variable PDSERVE_API_KEY)"
    return reason
