"""From the bytes of a body to what it asks for, whichever API it is for.

Bodies of other APIs than OpenAI's older two become chats, of the same plan. An error about such a
chat is in the words of the API asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.asked import Asked, Words, asked_of_fields
from router.api.bodies.json_text import checked_text
from router.api.bodies.messages import request as messages
from router.api.bodies.places import Places
from router.api.bodies.responses import request as responses
from router.api.bodies.schemas import (
    AnyBody,
    ChatBody,
    CompletionBody,
    WholeBody,
    parse_body,
    parse_fields,
)
from router.api.bodies.unknown_fields import LeftOut, named_fields


class RequestKind(Enum):
    """Which of the APIs a body is for; either of the first two: a chat if it has messages."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSE = "response"
    MESSAGE = "message"
    COUNTED_MESSAGE = "counted message"
    EITHER = "either"


_BODIES: Mapping[RequestKind, type[WholeBody]] = {
    RequestKind.CHAT: ChatBody,
    RequestKind.COMPLETION: CompletionBody,
    RequestKind.RESPONSE: responses.ResponseBody,
    RequestKind.MESSAGE: messages.MessageBody,
    RequestKind.COUNTED_MESSAGE: messages.CountedBody,
}


EVERYWHERE = (
    *("cache_salt", "priority", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("truncate_prompt_tokens", "prompt_cache_key", "user"),
)
"""Fields of chats about isolation, limits and sessions, which mean the same on every endpoint."""


def asked_of(kind: RequestKind, raw: bytes) -> Asked:
    """Return what a body of any API asks for. Raises `InvalidRequest` naming the field at fault."""
    body = _parsed(kind, raw)
    if isinstance(body, ChatBody | CompletionBody):
        return asked_of_fields(body, Words({"ignored_fields": named_fields(body.unknown_fields())}))
    fields, words, places = _as_chat(body)
    try:
        return asked_of_fields(parse_fields(ChatBody, fields), words)
    except InvalidRequest as error:
        raise places.in_words_of_client(error) from None


def _parsed(kind: RequestKind, raw: bytes) -> WholeBody:
    text = checked_text(raw)
    if kind is RequestKind.EITHER:
        has_messages = parse_body(AnyBody, text).messages is not None
        kind = RequestKind.CHAT if has_messages else RequestKind.COMPLETION
    return parse_body(_BODIES[kind], text)


def _as_chat(body: WholeBody) -> tuple[dict[str, Any], Words, Places]:
    """Return the fields of the chat that another API's body becomes, and what is said of it."""
    left_out = LeftOut()
    for name in body.fields_left_out():
        left_out.add(f"the field {name!r}")
    shown: dict[str, Any] = {}
    if isinstance(body, responses.ResponseBody):
        shown["repeated"] = responses.repeated_fields(body)
        places = Places(responses.PLACES)
        chat, shown["client_tools"] = responses.chat_of_response(body, places, left_out)
    else:
        assert isinstance(body, messages.MessageBody)
        places = Places(messages.PLACES)
        chat = messages.chat_of_message(body, places, left_out)
    ignored = named_fields([name for name in body.unknown_fields() if name not in EVERYWHERE])
    shown |= {"ignored_fields": ignored, "left_out": left_out.kinds}
    extra = body.model_extra or {}
    chat |= {name: extra[name] for name in EVERYWHERE if name in extra}
    fields = {name: value for name, value in chat.items() if value is not None}
    words = Words(shown, places, keeps_system=isinstance(body, messages.MessageBody))
    return fields, words, places
