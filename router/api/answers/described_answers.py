"""Answers, events and errors of the generation endpoints as JSON schemas, for `/openapi.json`.

Nothing is checked with them at run time; a test compares real answers with them.
"""

from __future__ import annotations

from router.api.bodies.schemas import ChatBody, CompletionBody, DetokenizeBody
from router.http.described import (
    COMMON_ERRORS,
    COUNT,
    ERROR,
    ERRORS,
    TEXT,
    Responses,
    Schema,
    described_body,
    error_responses,
    good_response,
    list_of,
    object_of,
    or_null,
    schema_of_model,
)

_TOKEN_IDS: Schema = list_of(COUNT)
_LOGPROB: Schema = {"type": "number", "maximum": 0}

_USAGE = object_of(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
        "completion_tokens_details": object_of(
            {"accepted_prediction_tokens": COUNT, "rejected_prediction_tokens": COUNT}
        ),
    }
)
_CHAT_TOKEN = {"token": TEXT, "logprob": _LOGPROB, "bytes": list_of(COUNT)}
_CHAT_LOGPROBS = object_of(
    {
        "content": list_of(
            object_of({**_CHAT_TOKEN, "top_logprobs": list_of(object_of(_CHAT_TOKEN))})
        ),
        "refusal": {"type": "null"},
    }
)
_COMPLETION_LOGPROBS = object_of(
    {
        "tokens": list_of(TEXT),
        "token_logprobs": {
            **list_of(or_null(_LOGPROB)),
            "description": "null for the first token of a prompt that is echoed.",
        },
        "top_logprobs": list_of(or_null({"type": "object", "additionalProperties": _LOGPROB})),
        "text_offset": list_of(COUNT),
    }
)
_PROMPT_LOGPROBS: Schema = {
    **list_of(
        or_null(
            {
                "type": "object",
                "additionalProperties": object_of(
                    {
                        "logprob": _LOGPROB,
                        "rank": {"type": "integer", "minimum": 1},
                        "decoded_token": TEXT,
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
        "anyOf": [TEXT, COUNT, {"type": "null"}],
        "description": "The stop string or stop token that ended the choice.",
    },
    "token_ids": {**_TOKEN_IDS, "description": "With return_token_ids."},
}
_PROMPT_TOKEN_IDS = {**_TOKEN_IDS, "description": "With return_token_ids."}


def _answer(kind: str, choice: Schema, **more: Schema) -> Schema:
    return object_of(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": {**COUNT, "description": "Unix time in seconds."},
            "model": TEXT,
            "system_fingerprint": TEXT,
            "choices": list_of(choice),
            **more,
        },
        "prompt_token_ids",
        "prompt_logprobs",
        *(("usage",) if kind.endswith("chunk") else ()),
    )


def _event(choice: dict[str, Schema], *optional: str) -> Schema:
    """Return a choice of an event: its end is in the last one alone."""
    ends = {**_ENDS, "finish_reason": or_null(_ENDS["finish_reason"])}
    return object_of({"index": COUNT, **choice, **ends}, *optional, "stop_reason", "token_ids")


_CALL: dict[str, Schema] = {"id": TEXT, "type": {"const": "function"}}
_FUNCTION: dict[str, Schema] = {
    "name": TEXT,
    "arguments": {**TEXT, "description": "The text of a JSON object."},
}
_SAID: dict[str, Schema] = {
    "role": {"const": "assistant"},
    "content": {**or_null(TEXT), "description": "null where the answer is calls alone."},
    "reasoning_content": {**TEXT, "description": "What a reasoning model thinks before it."},
}
_MESSAGE = object_of(
    {
        **_SAID,
        "refusal": {"type": "null"},
        "tool_calls": list_of(object_of({**_CALL, "function": object_of(_FUNCTION)})),
    },
    "reasoning_content",
    "tool_calls",
)
_CALL_DELTA = object_of(
    {"index": COUNT, **_CALL, "function": object_of(_FUNCTION, "name")}, "id", "type"
)
_DELTA = object_of({**_SAID, "tool_calls": list_of(_CALL_DELTA)}, *_SAID, "tool_calls")

CHAT_ANSWER = _answer(
    "chat.completion",
    object_of(
        {"index": COUNT, "message": _MESSAGE, "logprobs": or_null(_CHAT_LOGPROBS), **_ENDS},
        "token_ids",
    ),
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    prompt_logprobs=_PROMPT_LOGPROBS,
    usage=_USAGE,
)
CHAT_EVENT = _answer(
    "chat.completion.chunk",
    _event({"delta": _DELTA, "logprobs": or_null(_CHAT_LOGPROBS)}),
    prompt_token_ids=_PROMPT_TOKEN_IDS,
    usage=or_null(_USAGE),
)
_COMPLETION_CHOICE = {
    "text": TEXT,
    "logprobs": or_null(_COMPLETION_LOGPROBS),
    "prompt_token_ids": _PROMPT_TOKEN_IDS,
}
COMPLETION_ANSWER = _answer(
    "text_completion",
    object_of(
        {
            "index": COUNT,
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
        "text_completion", _event(_COMPLETION_CHOICE, "prompt_token_ids"), usage=or_null(_USAGE)
    ),
    "required": ["id", "object", "created", "model", "system_fingerprint", "choices"],
}

_ITEMS = list_of(object_of({"type": TEXT}))
RESPONSE_ANSWER = object_of(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": {"enum": ["in_progress", "completed", "incomplete"]},
        "model": TEXT,
        "output": {
            **_ITEMS,
            "description": "reasoning, message, function_call and custom_tool_call items.",
        },
        "usage": or_null(object_of({"input_tokens": COUNT, "output_tokens": COUNT})),
    }
)
MESSAGE_ANSWER = object_of(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": {**_ITEMS, "description": "thinking, text and tool_use blocks."},
        "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        "stop_sequence": or_null(TEXT),
        "usage": object_of({"input_tokens": COUNT, "output_tokens": COUNT}),
    }
)
NAMED_EVENT = {
    **object_of({"type": TEXT}),
    "description": "Its type is the name of the event; no [DONE] follows the last one.",
}
MESSAGE_ERROR = object_of(
    {"type": {"const": "error"}, "error": object_of({"type": TEXT, "message": TEXT})}
)


def responses(
    answer: Schema, event: Schema, error: Schema = ERROR, *, has_done: bool = True
) -> Responses:
    """Return what a generation endpoint answers, by status, as OpenAPI describes it.

    `has_done`: whether a stream ends with `[DONE]`.
    """
    last = "; then [DONE]" if has_done else ""
    stream = {
        "schema": event,
        "description": f"Server-sent events, each a JSON object behind `data: `{last}. "
        "Lines that begin with a colon say that the first or the next one is awaited.",
    }
    good = {
        "description": "The answer, or with `stream` its events",
        "content": {"application/json": {"schema": answer}, "text/event-stream": stream},
    }
    return {200: good, **error_responses(*ERRORS, schema=error)}


TOKENS = object_of({"count": COUNT, "max_model_len": COUNT, "tokens": _TOKEN_IDS})
PROMPT = object_of({"prompt": TEXT})
_TOKENIZATION_ERRORS: Responses = {
    **COMMON_ERRORS,
    **error_responses(400, 404, 408, 413, 429, 503, 504),
}
TOKENIZE_RESPONSES: Responses = {
    **good_response(TOKENS, "The tokens as a node gets them"),
    **_TOKENIZATION_ERRORS,
}
DETOKENIZE_RESPONSES: Responses = {
    **good_response(PROMPT, "The text, special tokens included"),
    **_TOKENIZATION_ERRORS,
}
TOKENIZE_BODY = described_body(
    {
        "anyOf": [schema_of_model(ChatBody), schema_of_model(CompletionBody)],
        "description": "A body of one of these endpoints: a chat where it has messages.",
    }
)
DETOKENIZE_BODY = described_body(schema_of_model(DetokenizeBody))
COUNT_RESPONSES: Responses = {
    **good_response(object_of({"input_tokens": COUNT}), "The tokens of the prompt"),
    **error_responses(*COMMON_ERRORS, *_TOKENIZATION_ERRORS, schema=MESSAGE_ERROR),
}

MODEL = object_of(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": COUNT,
        "owned_by": TEXT,
        "max_model_len": COUNT,
    }
)
MODELS = object_of({"object": {"const": "list"}, "data": list_of(MODEL)})
