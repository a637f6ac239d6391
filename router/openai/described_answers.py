"""Answers, events and errors of the generation endpoints as JSON schemas, for `/openapi.json`.

Nothing is checked with them at run time; a test compares real answers with them.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKEN_IDS: Schema = {"type": "array", "items": _COUNT}
_LOGPROB: Schema = {"type": "number", "maximum": 0}


def _object(properties: dict[str, Schema], *optional: str) -> Schema:
    """Return an object whose properties are all there, but for `optional` ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {**_or_null(_TEXT), "description": "The field at fault."},
                "code": _TEXT,
            }
        )
    }
)

ERRORS: dict[int | str, str] = {
    400: "The request is wrong; the error names the field",
    401: "The API key is missing or wrong",
    404: "Another model than the one that is served",
    413: "The body is too large",
    429: "A limit, or a deadline that cannot be met; Retry-After says when to ask again",
    502: "The nodes that ran the request were lost",
    503: "No node can take the request now; Retry-After says when to ask again",
    504: "The request was not done in time",
}

_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object(
            {"accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT}
        ),
    }
)
_CHAT_TOKEN = {"token": _TEXT, "logprob": _LOGPROB, "bytes": _list(_COUNT)}
_CHAT_LOGPROBS = _object(
    {
        "content": _list(_object({**_CHAT_TOKEN, "top_logprobs": _list(_object(_CHAT_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": {
            **_list(_or_null(_LOGPROB)),
            "description": "null for the first token of a prompt that is echoed.",
        },
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _LOGPROB})),
        "text_offset": _list(_COUNT),
    }
)
_PROMPT_LOGPROBS: Schema = {
    **_list(
        _or_null(
            {
                "type": "object",
                "additionalProperties": _object(
                    {
                        "logprob": _LOGPROB,
                        "rank": {"type": "integer", "minimum": 1},
                        "decoded_token": _TEXT,
                    }
                ),
            }
        )
    ),
    "description": "With prompt_logprobs: by token id; null for the first token.",
}
_ENDS: dict[str, Schema] = {
    "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
    "stop_reason": {
        "anyOf": [_TEXT, _COUNT, {"type": "null"}],
        "description": "The stop string or stop token that ended the choice.",
    },
    "token_ids": {**_TOKEN_IDS, "description": "With return_token_ids."},
}
_PROMPT_TOKEN_IDS = {**_TOKEN_IDS, "description": "With return_token_ids."}


def _answer(kind: str, choice: Schema, **more: Schema) -> Schema:
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": {**_COUNT, "description": "Unix time in seconds."},
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": _list(choice),
            **more,
        },
        "prompt_token_ids",
        "prompt_logprobs",
        *(("usage",) if kind.endswith("chunk") else ()),
    )


def _event(choice: dict[str, Schema], *optional: str) -> Schema:
    """Return a choice of an event: its end is in the last one alone."""
    ends = {**_ENDS, "finish_reason": _or_null(_ENDS["finish_reason"])}
    return _object({"index": _COUNT, **choice, **ends}, *optional, "stop_reason", "token_ids")


_CALL: dict[str, Schema] = {"id": _TEXT, "type": {"const": "function"}}
_FUNCTION: dict[str, Schema] = {
    "name": _TEXT,
    "arguments": {**_TEXT, "description": "The text of a JSON object."},
}
_SAID: dict[str, Schema] = {
    "role": {"const": "assistant"},
    "content": {**_or_null(_TEXT), "description": "null where the answer is calls alone."},
    "reasoning_content": {**_TEXT, "description": "What a reasoning model thinks before it."},
}
_MESSAGE = _object(
    {
        **_SAID,
        "refusal": {"type": "null"},
        "tool_calls": _list(_object({**_CALL, "function": _object(_FUNCTION)})),
    },
    "reasoning_content",
    "tool_calls",
)
_CALL_DELTA = _object(
    {"index": _COUNT, **_CALL, "function": _object(_FUNCTION, "name")}, "id", "type"
)
_DELTA = _object({**_SAID, "tool_calls": _list(_CALL_DELTA)}, *_SAID, "tool_calls")

CHAT_ANSWER = _answer(
    "chat.completion",
    _object(
        {"index": _COUNT, "message": _MESSAGE, "logprobs": _or_null(_CHAT_LOGPROBS), **_ENDS},
        "token_ids",
    ),
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    prompt_logprobs=_PROMPT_LOGPROBS,
    usage=_USAGE,
)
CHAT_EVENT = _answer(
    "chat.completion.chunk",
    _event({"delta": _DELTA, "logprobs": _or_null(_CHAT_LOGPROBS)}),
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    usage=_or_null(_USAGE),
)
_COMPLETION_CHOICE = {
    "text": _TEXT,
    "logprobs": _or_null(_COMPLETION_LOGPROBS),
    "prompt_token_ids": _PROMPT_TOKEN_IDS,
}
COMPLETION_ANSWER = _answer(
    "text_completion",
    _object(
        {
            "index": _COUNT,
            **_COMPLETION_CHOICE,
            "prompt_logprobs": _PROMPT_LOGPROBS,
            **_ENDS,
        },
        *("token_ids", "prompt_token_ids", "prompt_logprobs"),
    ),
    usage=_USAGE,
)
COMPLETION_EVENT = {
    **_answer(
        "text_completion", _event(_COMPLETION_CHOICE, "prompt_token_ids"), usage=_or_null(_USAGE)
    ),
    "required": ["id", "object", "created", "model", "system_fingerprint", "choices"],
}

_ITEMS = _list(_object({"type": _TEXT}))
RESPONSE_ANSWER = _object(
    {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "status": {"enum": ["in_progress", "completed", "incomplete"]},
        "model": _TEXT,
        "output": {**_ITEMS, "description": "reasoning, message and function_call items."},
        "usage": _or_null(_object({"input_tokens": _COUNT, "output_tokens": _COUNT})),
    }
)
MESSAGE_ANSWER = _object(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": {**_ITEMS, "description": "thinking, text and tool_use blocks."},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": _or_null(_TEXT),
        "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT}),
    }
)
NAMED_EVENT = {
    **_object({"type": _TEXT}),
    "description": "Its type is the name of the event; no [DONE] follows the last one.",
}
MESSAGE_ERROR = _object(
    {"type": {"const": "error"}, "error": _object({"type": _TEXT, "message": _TEXT})}
)


def responses(
    answer: Schema, event: Schema, error: Schema = ERROR
) -> dict[int | str, dict[str, Any]]:
    """Return what a generation endpoint answers, by status, as OpenAPI describes it."""
    stream = {
        "schema": event,
        "description": "Server-sent events, each a JSON object behind `data: `; then [DONE].",
    }
    good = {
        "description": "The answer, or with `stream` its events",
        "content": {"application/json": {"schema": answer}, "text/event-stream": stream},
    }
    return {200: good, **error_responses(*ERRORS, schema=error)}


def error_responses(*statuses: int | str, schema: Schema = ERROR) -> dict[int | str, Any]:
    """Return errors by status, as OpenAPI describes them."""
    content = {"application/json": {"schema": schema}}
    return {status: {"description": ERRORS[status], "content": content} for status in statuses}
