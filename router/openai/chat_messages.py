"""Messages of a chat request as the plain dictionaries that chat templates know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.errors import InvalidRequest
from router.openai.schemas import ChatMessage

_NO_HISTORY = ("audio", "tool_calls", "function_call")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Role, content as text, and the name where one is given.

    `developer` is OpenAI's newer word for `system`, which is the one that templates know. Several
    text parts become lines of one text. Raises `InvalidRequest` for anything that is not text.
    """
    if not messages:
        raise InvalidRequest("messages is empty: wanted at least one message", param="messages")
    return [_template_message(i, message) for i, message in enumerate(messages)]


def _template_message(place: int, message: ChatMessage) -> dict[str, Any]:
    for name in _NO_HISTORY:
        if getattr(message, name):
            field = f"messages.{place}.{name}"
            raise InvalidRequest(f"{field} is not supported by this server", param=field)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(f"messages.{place}.content", message),
    }
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(field: str, message: ChatMessage) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(f"{field} is missing", param=field)
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidRequest(
                f'{field}.{place} is not a content part: wanted {{"type": "text", "text": …}}',
                param=f"{field}.{place}",
            )
        if part["type"] != "text":
            raise InvalidRequest(
                f"{field}.{place}.type is {part['type'][:40]!r}: this server takes text alone",
                param=f"{field}.{place}.type",
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{field}.{place}.text is not text", param=f"{field}.{place}.text")
        texts.append(part["text"])
    return "\n".join(texts)
