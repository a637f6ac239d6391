"""What a body of any API asks for. Those of other APIs become chats, of the same plan.

An error about such a chat is in the words of the API asked.
"""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.asked import Asked, Words, asked_of_fields
from router.api.bodies.left_out import LeftOut
from router.api.bodies.messages import request as messages
from router.api.bodies.places import Places
from router.api.bodies.responses import request as responses
from router.api.bodies.schemas import ChatBody, CompletionBody, WholeBody, parse_fields
from router.api.bodies.unknown_fields import named_fields

EVERYWHERE = (
    *("cache_salt", "priority", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("truncate_prompt_tokens", "prompt_cache_key", "user"),
)
"""Fields of chats about isolation, limits and sessions, which mean the same on every endpoint."""


def asked_of(body: WholeBody) -> Asked:
    """Return what a body asks for. Raises `InvalidRequest` naming the field at fault."""
    unknown, absent = body.unknown_fields(), body.fields_left_out()
    shown: dict[str, Any] = {"ignored_fields": named_fields(unknown)}
    words = Words(shown)
    if not isinstance(body, ChatBody | CompletionBody):
        left_out = LeftOut()
        for name in absent:
            left_out.add(f"the field {name!r}")
        if isinstance(body, responses.ResponseBody):
            shown["repeated"] = responses.repeated_fields(body)
            places = Places(responses.PLACES)
            chat, shown["client_tools"] = responses.chat_of_response(body, places, left_out)
            words = Words(shown, places)
        else:
            assert isinstance(body, messages.MessageBody)
            places = Places(messages.PLACES)
            chat = messages.chat_of_message(body, places, left_out)
            words = Words(shown, places, keeps_system=True)
        ignored = named_fields([name for name in unknown if name not in EVERYWHERE])
        shown |= {"ignored_fields": ignored, "left_out": left_out.kinds}
        extra = body.model_extra or {}
        chat |= {name: extra[name] for name in EVERYWHERE if name in extra}
        given = {name: value for name, value in chat.items() if value is not None}
        try:
            body = parse_fields(ChatBody, given)
        except InvalidRequest as error:
            raise places.in_words_of_client(error) from None
    return asked_of_fields(body, words)
