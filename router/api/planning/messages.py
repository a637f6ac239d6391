"""Messages between the router and its planning process: bodies there, plans or errors back.

A message is two lengths, a head in JSON, and bytes that JSON would make slow or large. A plan is
one message with everything but its prompts, followed by one message for each prompt: its numbers,
its token ids and the offsets of their texts as unsigned 32-bit numbers, then its echo as UTF-8. The
event loop can thus unpack one prompt at a time. Errors keep their type. Nothing is unpickled: the
process reads what strangers send.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from common.errors import InternalError, InvalidRequest
from router.api.bodies.asked import RequestKind
from router.api.planning.planner import PlannedPrompt, RequestPlan
from router.http.errors import MAX_MESSAGE_CHARS, ModelNotFound
from router.text.chat.chat_template import TemplateRefused
from router.text.context_limits import ContextExceeded

LENGTHS = struct.Struct(">QQ")
"""How many bytes the head and the rest of a message have."""

_PLAN = TypeAdapter(RequestPlan)
_TOKEN_BYTES = 4
_INVALID = {kind.__name__: kind for kind in (InvalidRequest, ContextExceeded, TemplateRefused)}


class Message(NamedTuple):
    """A message without its lengths."""

    head: dict[str, Any]
    rest: bytes = b""


def pack_message(message: Message) -> tuple[bytes, bytes]:
    """Return what is written: lengths and head, and the rest, which is not copied."""
    head = json.dumps(message.head).encode()
    return LENGTHS.pack(len(head), len(message.rest)) + head, message.rest


def pack_request(kind: RequestKind, max_model_len: int, body: bytes) -> Message:
    """Return the message that asks for the plan of `body`."""
    return Message({"kind": kind.value, "max_model_len": max_model_len}, body)


def unpack_request(message: Message) -> tuple[RequestKind, int, bytes]:
    """Return kind, the most tokens in all, and the body."""
    return RequestKind(message.head["kind"]), message.head["max_model_len"], message.rest


def pack_plan(plan: RequestPlan) -> Iterator[Message]:
    """Yield the messages of a plan."""
    rest = _PLAN.dump_python(plan._replace(prompts=()), mode="json")
    yield Message({"num_prompts": len(plan.prompts), "plan": rest})
    for prompt in plan.prompts:
        ids, offsets = array("I", prompt.token_ids), array("I", prompt.echo_offsets)
        head = {
            "num_tokens": len(ids),
            "num_offsets": len(offsets),
            "seed": prompt.seed,
            "max_tokens": prompt.max_tokens,
            "is_cut_to_fit": prompt.is_cut_to_fit,
        }
        yield Message(head, ids.tobytes() + offsets.tobytes() + prompt.echo.encode())


def unpack_prompt(message: Message) -> PlannedPrompt:
    """Return one prompt of a plan."""
    head, num_tokens = message.head, message.head["num_tokens"]
    end = (num_tokens + head["num_offsets"]) * _TOKEN_BYTES
    numbers = array("I")
    numbers.frombytes(memoryview(message.rest)[:end])
    return PlannedPrompt(
        token_ids=tuple(numbers[:num_tokens]),
        seed=head["seed"],
        max_tokens=head["max_tokens"],
        is_cut_to_fit=head["is_cut_to_fit"],
        echo=message.rest[end:].decode(),
        echo_offsets=tuple(numbers[num_tokens:]),
    )


def unpack_plan(head: Mapping[str, Any], prompts: Sequence[PlannedPrompt]) -> RequestPlan:
    """Return the plan of its first message's head, with its prompts."""
    return _PLAN.validate_python(head["plan"])._replace(prompts=tuple(prompts))


def pack_error(error: Exception, trace: str = "") -> Message:
    """Return the message of an error; any that no planner should raise becomes an `InternalError`,
    with the text of its traceback for the router's log.
    """
    described: dict[str, Any]
    if isinstance(error, ModelNotFound):
        described = {"type": "ModelNotFound", "asked": error.asked, "served": error.served}
    elif type(error).__name__ in _INVALID and isinstance(error, InvalidRequest):
        message = str(error)[:MAX_MESSAGE_CHARS]
        described = {"type": type(error).__name__, "message": message, "param": error.param}
    else:
        described = {"type": "InternalError", "trace": trace}
    return Message({"error": described})


def unpack_error(described: Mapping[str, Any]) -> Exception:
    """Return the error under "error" in a message's head."""
    kind = described["type"]
    if kind == "ModelNotFound":
        return ModelNotFound(described["asked"], described["served"])
    if kind in _INVALID:
        return _INVALID[kind](described["message"], param=described["param"])
    error = InternalError("the server failed on this request")
    error.add_note(described["trace"])
    return error


assert array("I").itemsize == _TOKEN_BYTES, sys.platform
