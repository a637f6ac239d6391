"""The answer of Anthropic's `/v1/messages`: events about content blocks, and the whole message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from common.request import FinishReason
from router.http.errors import ApiError, anthropic_error
from router.http.sse import named_event
from router.openai.chat_parts import call_id
from router.openai.items_format import Item, ItemKind, ItemsFormat


class MessageFormat(ItemsFormat):
    """`/v1/messages`."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that failed."""
        return named_event("error", anthropic_error(error))

    def _begin(self) -> Iterator[bytes]:
        yield _event("message_start", {"message": self._message([], None, None)})

    def _open_item(self, item: Item) -> Iterator[bytes]:
        block = self._block(item, "")
        if item.kind is ItemKind.CALL:
            block["input"] = {}
        yield _event("content_block_start", {"index": item.number, "content_block": block})

    def _more(self, item: Item, text: str) -> bytes:
        match item.kind:
            case ItemKind.CALL:
                delta = {"type": "input_json_delta", "partial_json": text}
            case ItemKind.THINKING:
                delta = {"type": "thinking_delta", "thinking": text}
            case ItemKind.TEXT:
                delta = {"type": "text_delta", "text": text}
        return _event("content_block_delta", {"index": item.number, "delta": delta})

    def _close(self, item: Item) -> Iterator[bytes]:
        yield _event("content_block_stop", {"index": item.number})

    def _end(self) -> Iterator[bytes]:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", {"delta": delta, "usage": self._counts()})
        yield _event("message_stop", {})

    def _answer(self) -> dict[str, Any]:
        blocks = [self._block(item, item.text) for item in self._items]
        return self._message(blocks, *self._stop())

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._head.id.replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._counts(),
        }

    def _stop(self) -> tuple[str, str | None]:
        if self._finish is FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(self._stop_reason, str):
            return "stop_sequence", self._stop_reason
        return ("tool_use" if self._has_calls else "end_turn"), None

    def _counts(self) -> dict[str, Any]:
        cached = self._usage.cached_tokens
        return {
            "input_tokens": self._usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._usage.completion_tokens,
        }

    def _block(self, item: Item, text: str) -> dict[str, Any]:
        if item.kind is ItemKind.THINKING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        if item.kind is ItemKind.TEXT:
            return {"type": "text", "text": text}
        called = "toolu" + call_id(self._head.id, 0, item.number).removeprefix("call")
        return {"type": "tool_use", "id": called, "name": item.name, "input": _object(text)}


def _object(text: str) -> Any:
    """Return the arguments of a call as an object: an empty one where the answer was cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return named_event(kind, {"type": kind, **fields})
