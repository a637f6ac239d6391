"""Requests of other APIs as chats: the same plan, and errors in the words of the API asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.openai.messages import request as messages
from router.openai.responses import request as responses
from router.openai.schemas import ChatBody, WholeBody, parse_body, parse_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A request as a chat. `names` are its fields, under each the name that chats have for it.

    `repeated` are the fields that the answer has too.
    """

    chat: ChatBody
    body: WholeBody
    names: Mapping[str, str]
    repeated: Mapping[str, Any]


def translated_response(raw: bytes) -> Translation:
    """Translate a body of `/v1/responses`. Raises `InvalidRequest`."""
    body = parse_body(responses.ResponseBody, raw)
    fields, names = responses.chat_of_response(body), responses.CHAT_FIELDS
    repeated = responses.repeated_fields(body)
    return Translation(chat=_chat(fields, names), body=body, names=names, repeated=repeated)


def translated_message(raw: bytes) -> Translation:
    """Translate a body of `/v1/messages`. Raises `InvalidRequest`."""
    body = parse_body(messages.MessageBody, raw)
    fields, names = messages.chat_of_message(body), messages.CHAT_FIELDS
    return Translation(chat=_chat(fields, names), body=body, names=names, repeated={})


def in_words_of(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return an error about a chat with the names of fields that the client knows."""
    text, param = str(error), error.param
    for name, chat_name in names.items():
        whole_name = rf"\b{re.escape(chat_name)}\b"
        text = re.sub(whole_name, name, text)
        param = param and re.sub(f"^{whole_name}", name, param)
    return type(error)(text, param=param)


def _chat(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatBody:
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return parse_fields(ChatBody, given)
    except InvalidRequest as error:
        raise in_words_of(error, names) from None
