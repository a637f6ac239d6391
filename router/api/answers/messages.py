"""The answer of Anthropic's `/v1/messages`: events about content blocks, and the whole message."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any, NoReturn

from common.request import FinishReason
from router.api.answers.chat_and_completions import AnswerHead
from router.api.answers.chat_parts import call_id
from router.api.answers.items import Item, ItemKind, ItemsFormat
from router.api.planning.planner import RequestPlan
from router.http.errors import ApiError, anthropic_error
from router.http.sse import named_event, to_json
from router.text.output.usage import Usage
from router.tools.json_extent import JsonExtent


class MessageFormat(ItemsFormat):
    """`/v1/messages`. Its first event has the tokens that were in a cache."""

    ping = named_event("ping", {"type": "ping"})
    begins_early = False

    def __init__(self, head: AnswerHead, plan: RequestPlan, usage: Usage) -> None:
        """Set the format up; see `ItemsFormat`."""
        super().__init__(head, plan, usage)
        # A client that asked for more than the context leaves did not set the limit that was met.
        (prompt,) = plan.prompts
        self._length_reason = (
            "model_context_window_exceeded" if prompt.is_cut_to_fit else "max_tokens"
        )

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that failed."""
        return named_event("error", anthropic_error(error))

    def _begin(self) -> Iterator[bytes]:
        yield _event("message_start", {"message": {**self._message(None, None), "content": []}})

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
        if item.kind is ItemKind.THINKING:
            delta = {"type": "signature_delta", "signature": _signature(item.text)}
            yield _event("content_block_delta", {"index": item.number, "delta": delta})
        yield _event("content_block_stop", {"index": item.number})

    def _end(self) -> Iterator[bytes]:
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", {"delta": delta, "usage": self._counts()})
        yield _event("message_stop", {})

    def _answer(self) -> str:
        message = to_json(self._message(*self._stop()))
        blocks = ",".join(self._whole_block(item) for item in self._items)
        return f'{message[:-1]},"content":[{blocks}]}}'

    def _whole_block(self, item: Item) -> str:
        block = to_json(self._block(item, item.text))
        if item.kind is not ItemKind.CALL:
            return block
        return f'{block[:-1]},"input":{_object(item.text)}}}'

    def _message(self, reason: str | None, sequence: str | None) -> dict[str, Any]:
        """Return a message without its content."""
        return {
            "id": self._head.id.replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._counts(),
        }

    def _stop(self) -> tuple[str, str | None]:
        if self._finish is FinishReason.LENGTH:
            return self._length_reason, None
        if isinstance(self._stop_reason, str):
            return "stop_sequence", self._stop_reason
        # A client runs the calls of `tool_use`: not one that a stop token cut off.
        return ("tool_use" if self._parser.ends_in_calls else "end_turn"), None

    def _counts(self) -> dict[str, Any]:
        cached = self._usage.cached_tokens
        return {
            "input_tokens": self._usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._usage.completion_tokens,
        }

    def _block(self, item: Item, text: str) -> dict[str, Any]:
        """Return a block; of a call, without its input."""
        if item.kind is ItemKind.THINKING:
            signature = _signature(text) if text else ""  # of an open block it is its last delta
            return {"type": "thinking", "thinking": text, "signature": signature}
        if item.kind is ItemKind.TEXT:
            return {"type": "text", "text": text}
        called = "toolu" + call_id(self._head.id, 0, item.number).removeprefix("call")
        return {"type": "tool_use", "id": called, "name": item.name}


def _signature(thought: str) -> str:
    """Return the signature of a block, without which clients send it back as text or not at all."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def _object(text: str) -> str:
    """Return the arguments of a call as the model wrote them; `{}` where the answer was cut off.

    They are not read and written again: Python's numbers and texts do not hold all of JSON.
    """
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except ValueError:
        return "{}"
    except RecursionError:
        # The grammar of the answer has made it JSON, however deep, but it may have no end.
        extent = JsonExtent()
        extent.end_in(text)
        return text if extent.is_over else "{}"
    return text


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return named_event(kind, {"type": kind, **fields})
