"""Every error as OpenAI's clients expect it: a status and an `error` object.

400 InvalidRequest     404 unknown model or path    413 body too large     504 DeadlineExceeded
401 wrong or no key    405 wrong method             502 NodeLost, HandoffFailed, StaleEpoch
403 not an admin's key, or a web page of another site where there are no keys
408 a body that stood still while others needed its place
415 the body of a drain without the content-type of JSON
429 a limit, or DeadlineUnreachable    503 Overloaded, PoolExhausted, PlacementUnavailable
500 any bug of this server
"""

from __future__ import annotations

import math

from common.errors import (
    DeadlineExceeded,
    DeadlineUnreachable,
    HandoffFailed,
    InvalidRequest,
    NodeLost,
    Overloaded,
    PdserveError,
    PlacementUnavailable,
    PoolExhausted,
    StaleEpoch,
)
from router.http.sse import DONE, event, to_json

MAX_MESSAGE_CHARS = 1000
"""Most characters of the text of an error; the rest is cut off."""

_MAX_NAME_CHARS = 200

CLIENT_ERROR = "invalid_request_error"
RATE_LIMIT_ERROR = "rate_limit_error"
SERVER_ERROR = "server_error"

ANTHROPIC_PATH = "/v1/messages"

_BUSY_RETRY_S = 1


class ApiError(Exception):
    """An error with its HTTP status and OpenAI's four fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.code = code
        self.param = param
        self.headers = headers or {}

    def as_json(self) -> str:
        """Return the body, which is also the payload of the last event of a failed stream."""
        return to_json(
            {
                "error": {
                    "message": self.message,
                    "type": self._type(),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def _type(self) -> str:
        if self.status == 429:
            return RATE_LIMIT_ERROR
        return CLIENT_ERROR if self.status < 500 else SERVER_ERROR


def anthropic_error(error: ApiError) -> dict[str, object]:
    """Return the body of an error in the shape of Anthropic's API."""
    types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    types |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
    types |= {504: "timeout_error"}
    kind = types.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_event(error: ApiError) -> bytes:
    """Return the end of a stream that failed, in OpenAI's shape."""
    return event(error.as_json()) + DONE


def error_json(error: ApiError, path: str) -> str:
    """Return the body of an error of the endpoint at `path`, in the shape of its API."""
    if path.startswith(ANTHROPIC_PATH):
        return to_json(anthropic_error(error))
    return error.as_json()


class TooManyRequests(ApiError):
    """This router has its maximum of requests in progress, regardless of the nodes' free seats."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            429,
            f"the router has {limit} requests in progress, the most it takes",
            code="rate_limit_exceeded",
            headers={"retry-after": str(_BUSY_RETRY_S)},
        )


class BodyTooLarge(ApiError):
    """The body is larger than the server accepts; it was not read to its end."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            413,
            f"the body is larger than {max_bytes} bytes, the most this server takes",
            code="body_too_large",
        )


class ModelNotFound(ApiError):
    """The request names another model than the one this cluster serves."""

    def __init__(self, asked: str, served: str) -> None:
        self.asked = asked[:_MAX_NAME_CHARS]
        self.served = served
        super().__init__(
            404,
            f"model {self.asked!r} is not served here: this cluster serves {served!r}",
            code="model_not_found",
            param="model",
        )


def api_error(error: Exception) -> ApiError:
    """Return the error for a client. An unexpected error becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), code=error.code, param=error.param)
        case DeadlineUnreachable():
            wait_s = max(1, math.ceil(error.retry_after_s))
            return ApiError(429, str(error), code=error.code, headers={"retry-after": str(wait_s)})
        case Overloaded():
            wait_s = max(1, math.ceil(error.retry_after_s))
            return ApiError(503, str(error), code=error.code, headers={"retry-after": str(wait_s)})
        case PoolExhausted() | PlacementUnavailable():
            headers = {"retry-after": str(_BUSY_RETRY_S)}
            return ApiError(503, str(error), code=error.code, headers=headers)
        case DeadlineExceeded():
            return ApiError(504, str(error), code=error.code)
        case NodeLost() | HandoffFailed() | StaleEpoch():
            headers = {"retry-after": str(_BUSY_RETRY_S)}
            return ApiError(502, str(error), code=error.code, headers=headers)
        case PdserveError():
            return ApiError(500, str(error), code=error.code)
        case _:
            return ApiError(500, "the server failed on this request", code="internal_error")
