"""The answer of `/v1/responses`: events about items, and the whole response.

Every event has its name and its number in the stream. Nothing is stored: a response cannot be asked
for again, and the client sends the conversation with each request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.request import FinishReason
from router.api.answers.chat_parts import call_id
from router.api.answers.items import Item, ItemKind, ItemsFormat
from router.api.bodies.thought_codes import code_of
from router.http.errors import ApiError
from router.http.sse import named_event, to_json

_ID_PREFIX = {ItemKind.THINKING: "rs", ItemKind.TEXT: "msg", ItemKind.CALL: "fc"}
_PART_TYPE = {ItemKind.THINKING: "reasoning_text", ItemKind.TEXT: "output_text"}


class ResponseFormat(ItemsFormat):
    """`/v1/responses`."""

    _num_events = 0
    _error: ApiError | None = None

    def error_event(self, error: ApiError) -> bytes:
        """Return the events that end a stream that failed: the error, and the failed response."""
        self._error = error
        fields = {"code": error.code, "message": error.message, "param": error.param}
        shown = self._event("error", fields)
        return shown + self._event("response.failed", {"response": self._response("failed")})

    def _begin(self) -> Iterator[bytes]:
        response = self._response("in_progress")
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})

    def _open_item(self, item: Item) -> Iterator[bytes]:
        shown = self._item(item, is_over=False)
        fields = {"output_index": item.number, "item": shown}
        yield self._event("response.output_item.added", fields)
        if item.kind is not ItemKind.CALL:
            yield self._about(item, "response.content_part.added", {"part": _part(item, "")})

    def _more(self, item: Item, text: str) -> bytes:
        match item.kind:
            case ItemKind.CALL:
                return self._about(item, f"response.{_call_event(item)}.delta", {"delta": text})
            case ItemKind.THINKING:
                return self._about(item, "response.reasoning_text.delta", {"delta": text})
            case ItemKind.TEXT:
                more: dict[str, Any] = {"delta": text, "logprobs": []}
                return self._about(item, "response.output_text.delta", more)

    def _close(self, item: Item) -> Iterator[bytes]:
        text = item.text
        match item.kind:
            case ItemKind.CALL:
                fields = {"input": text} if item.reader else {"name": item.name, "arguments": text}
                yield self._about(item, f"response.{_call_event(item)}.done", fields)
            case ItemKind.THINKING:
                yield self._about(item, "response.reasoning_text.done", {"text": text})
            case ItemKind.TEXT:
                done: dict[str, Any] = {"text": text, "logprobs": []}
                yield self._about(item, "response.output_text.done", done)
        if item.kind is not ItemKind.CALL:
            yield self._about(item, "response.content_part.done", {"part": _part(item, text)})
        whole = {"output_index": item.number, "item": self._item(item, is_over=True)}
        yield self._event("response.output_item.done", whole)

    def _end(self) -> Iterator[bytes]:
        response = self._ended()
        yield self._event(f"response.{response['status']}", {"response": response})

    def _answer(self) -> str:
        return to_json(self._ended())

    def _ended(self) -> dict[str, Any]:
        is_cut = self._finish is FinishReason.LENGTH
        return self._response("incomplete" if is_cut else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        head = self._head
        is_cut = status == "incomplete"
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created_s,
            "status": status,
            "background": False,
            "error": None if self._error is None else _error_of_response(self._error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": head.model,
            "output": [self._item(item, is_over=True) for item in self._items],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._repeated,
            "usage": None if status in ("in_progress", "failed") else self._counts(),
        }

    def _counts(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,  # what is written to a cache is not counted apart
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.thinking_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _item(self, item: Item, *, is_over: bool) -> dict[str, Any]:
        has_no_end = self._finish is FinishReason.LENGTH or self._error is not None
        has_no_end |= self._parser.is_in_arguments  # a stop token cut them off
        is_cut = is_over and has_no_end and item is self._items[-1]
        status = "incomplete" if is_cut else "completed" if is_over else "in_progress"
        text = item.text if is_over else ""
        base = {"id": self._item_id(item), "status": status}
        if item.kind is ItemKind.CALL:
            called = call_id(self._head.id, 0, item.number)
            call: dict[str, Any] = {**base, "type": "function_call", "call_id": called}
            call |= {"name": item.name} | ({"namespace": item.namespace} if item.namespace else {})
            if item.reader:
                return call | {"type": "custom_tool_call", "input": text}
            return call | {"arguments": text}
        content = [_part(item, text)] if is_over else []
        if item.kind is ItemKind.THINKING:
            thought: dict[str, Any] = {
                **base,
                "type": "reasoning",
                "summary": [],
                "content": content,
            }
            if self._has_thought_codes:
                thought["encrypted_content"] = code_of(text) if is_over else None
            return thought
        return {**base, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, item: Item) -> str:
        prefix = "ctc" if item.reader else _ID_PREFIX[item.kind]
        return f"{prefix}_{self._head.id.rpartition('-')[2]}{item.number}"

    def _about(self, item: Item, kind: str, fields: dict[str, Any]) -> bytes:
        place: dict[str, Any] = {"item_id": self._item_id(item), "output_index": item.number}
        if item.kind is not ItemKind.CALL:
            place["content_index"] = 0
        return self._event(kind, place | fields)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})


def _call_event(item: Item) -> str:
    return "custom_tool_call_input" if item.reader else "function_call_arguments"


def _part(item: Item, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PART_TYPE[item.kind], "text": text}
    if item.kind is ItemKind.TEXT:
        part |= {"annotations": [], "logprobs": []}
    return part


def _error_of_response(error: ApiError) -> dict[str, str]:
    """Return the error in a failed response, whose codes are a closed list of OpenAI's API."""
    if error.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if error.status < 500 else "server_error"
    return {"code": code, "message": error.message}
