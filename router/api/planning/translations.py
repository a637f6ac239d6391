"""Requests of other APIs as chats: the same plan, and errors in the words of the API asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.messages import request as messages
from router.api.bodies.places import Places
from router.api.bodies.responses import request as responses
from router.api.bodies.schemas import ChatBody, WholeBody, parse_body, parse_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A request as a chat. `places` are where the client wrote the parts of the chat.

    `repeated` are the fields that the answer has too.
    """

    chat: ChatBody
    body: WholeBody
    places: Places
    repeated: Mapping[str, Any]


def translated_response(raw: bytes) -> Translation:
    """Translate a body of `/v1/responses`. Raises `InvalidRequest`."""
    body = parse_body(responses.ResponseBody, raw)
    places = Places(responses.PLACES)
    fields = responses.chat_of_response(body, places)
    repeated = responses.repeated_fields(body)
    return Translation(chat=_chat(fields, places), body=body, places=places, repeated=repeated)


def translated_message(raw: bytes) -> Translation:
    """Translate a body of `/v1/messages`. Raises `InvalidRequest`."""
    body = parse_body(messages.MessageBody, raw)
    places = Places(messages.PLACES)
    fields = messages.chat_of_message(body, places)
    return Translation(chat=_chat(fields, places), body=body, places=places, repeated={})


def _chat(fields: Mapping[str, Any], places: Places) -> ChatBody:
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return parse_fields(ChatBody, given)
    except InvalidRequest as error:
        raise places.in_words_of_client(error) from None
