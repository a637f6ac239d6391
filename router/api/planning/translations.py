"""Requests of other APIs as chats: the same plan, and errors in the words of the API asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.client_tools import ClientTool
from router.api.bodies.left_out import LeftOut
from router.api.bodies.messages import request as messages
from router.api.bodies.places import Places
from router.api.bodies.responses import request as responses
from router.api.bodies.schemas import ChatBody, WholeBody, parse_body, parse_fields

EVERYWHERE = (
    *("cache_salt", "priority", "min_tokens", "ignore_eos", "stop_token_ids"),
    "truncate_prompt_tokens",
)
"""Fields of chats about isolation and limits, which mean the same on every endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A request as a chat. `places` are where the client wrote the parts of the chat.

    `repeated` are the fields that the answer has too, `client_tools` the tools that the client
    knows as something else than a function of that name. `left_out` is what the chat lacks.
    With `keeps_system` every message of the system is in the prompt, whatever the template does.
    """

    chat: ChatBody
    body: WholeBody
    places: Places
    left_out: tuple[str, ...]
    repeated: Mapping[str, Any] = field(default_factory=dict)
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)
    keeps_system: bool = False

    def unknown_fields(self) -> list[str]:
        """Return the fields that are in no group, each once, in no order."""
        return [name for name in self.body.unknown_fields() if name not in EVERYWHERE]


def translated_response(raw: bytes) -> Translation:
    """Translate a body of `/v1/responses`. Raises `InvalidRequest`."""
    body = parse_body(responses.ResponseBody, raw)
    places, left_out = Places(responses.PLACES), _left_out(body)
    asked = responses.chat_of_response(body, places, left_out)
    return Translation(
        chat=_chat(body, asked.chat, places),
        body=body,
        places=places,
        left_out=left_out.kinds,
        repeated=responses.repeated_fields(body),
        client_tools=asked.client_tools,
    )


def translated_message(
    raw: bytes, kind: type[messages.MessageBody] = messages.MessageBody
) -> Translation:
    """Translate a body of `/v1/messages`, or of what counts one. Raises `InvalidRequest`."""
    body = parse_body(kind, raw)
    places, left_out = Places(messages.PLACES), _left_out(body)
    fields = messages.chat_of_message(body, places, left_out)
    return Translation(
        chat=_chat(body, fields, places),
        body=body,
        places=places,
        left_out=left_out.kinds,
        keeps_system=True,
    )


def _left_out(body: WholeBody) -> LeftOut:
    left_out = LeftOut()
    for name in body.fields_left_out():
        left_out.add(f"the field {name!r}")
    return left_out


def _chat(body: WholeBody, fields: Mapping[str, Any], places: Places) -> ChatBody:
    extra = body.model_extra or {}
    fields = {**fields, **{name: extra[name] for name in EVERYWHERE if name in extra}}
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return parse_fields(ChatBody, given)
    except InvalidRequest as error:
        raise places.in_words_of_client(error) from None
