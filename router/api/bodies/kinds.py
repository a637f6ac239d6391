"""Which API a body is for, and the body as that API has it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from router.api.bodies.json_text import checked_text
from router.api.bodies.messages.request import CountedBody, MessageBody
from router.api.bodies.responses.request import ResponseBody
from router.api.bodies.schemas import AnyBody, ChatBody, CompletionBody, WholeBody, parse_body


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
    RequestKind.RESPONSE: ResponseBody,
    RequestKind.MESSAGE: MessageBody,
    RequestKind.COUNTED_MESSAGE: CountedBody,
}


def parse_request(kind: RequestKind, raw: bytes) -> WholeBody:
    """Parse the body of any API. Raises `InvalidRequest` naming the field at fault."""
    text = checked_text(raw)
    if kind is RequestKind.EITHER:
        has_messages = parse_body(AnyBody, text).messages is not None
        kind = RequestKind.CHAT if has_messages else RequestKind.COMPLETION
    return parse_body(_BODIES[kind], text)
