"""What travels between the router and its planning process: bodies there, plans or errors back.

A message is two lengths, a head in JSON, and bytes that JSON would make slow or large. A plan is
one message with everything but its prompts, followed by one message for each prompt: its token ids
and the offsets of their texts as unsigned 32-bit numbers, then its echo as UTF-8. The event loop
can thus unpack one prompt at a time. Errors keep their type. Nothing is unpickled: the process
reads what strangers send.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from common.errors import InternalError, InvalidRequest
from common.request import SamplingParams
from common.token_rules import NO_RULES, TokenRules
from grammars.trying.messages import grammar_fields, grammar_of_fields, parts_fields, parts_of
from router.api.bodies.client_tools import ClientTool
from router.api.planning.request_plan import ChoicePlan, RequestKind, RequestPlan
from router.http.errors import MAX_MESSAGE_CHARS, ModelNotFound
from router.text.chat_template import TemplateRefused
from router.text.context_limits import ContextExceeded
from router.text.usage import UsageEvents
from router.tools.answer_parser import AnswerSyntax
from router.tools.thinking import ThinkingFormat

LENGTHS = struct.Struct(">QQ")
"""How many bytes the head and the rest of a message have."""

_TOKEN_BYTES = 4
_INVALID = {kind.__name__: kind for kind in (InvalidRequest, ContextExceeded, TemplateRefused)}


class Message(NamedTuple):
    """A message without its lengths."""

    head: dict[str, Any]
    rest: bytes = b""


class Prompt(NamedTuple):
    """A prompt of a plan: its tokens, and its text where that is shown before the answer.

    `offsets` is where each token's text starts, or is empty.
    """

    token_ids: tuple[int, ...]
    echo: str
    offsets: tuple[int, ...] = ()


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
    firsts = plan.choices[:: plan.choices_per_prompt]
    yield Message(
        {
            "num_prompts": len(firsts),
            "choices": [
                {
                    "sampling": _own_sampling(choice.sampling),
                    "priority": choice.priority,
                }
                for choice in plan.choices
            ],
            "grammar": None if plan.grammar is None else grammar_fields(plan.grammar),
            "grammar_parts": parts_fields(plan.grammar_parts),
            "rules": asdict(plan.rules),
            "cache_salt": plan.cache_salt,
            "choices_per_prompt": plan.choices_per_prompt,
            "returned_per_prompt": plan.returned_per_prompt,
            "stop": plan.stop,
            "hidden_token_ids": sorted(plan.hidden_token_ids),
            "stop_token_ids": sorted(plan.stop_token_ids),
            "shows_stop": plan.shows_stop,
            "shows_special_tokens": plan.shows_special_tokens,
            "has_logprobs": plan.has_logprobs,
            "returns_token_ids": plan.returns_token_ids,
            "is_stream": plan.is_stream,
            "usage_events": plan.usage_events.value,
            "continues_prompt": plan.continues_prompt,
            "repeated": dict(plan.repeated),
            "syntax": asdict(plan.syntax) | {"thinking": plan.syntax.thinking.value},
            "ignored_fields": plan.ignored_fields,
            "left_out": plan.left_out,
            "client_tools": plan.client_tools,
            "prompt_logprobs": plan.prompt_logprobs,
            "echo_logprobs": plan.echo_logprobs,
            "has_output": plan.has_output,
        }
    )
    for choice in firsts:
        ids = array("I", choice.prompt_token_ids)
        offsets = array("I", choice.echo_offsets)
        head = {"num_tokens": len(ids), "num_offsets": len(offsets)}
        yield Message(head, ids.tobytes() + offsets.tobytes() + choice.echo.encode())


def unpack_prompt(message: Message) -> Prompt:
    """Return one prompt of a plan."""
    num_tokens = message.head["num_tokens"]
    end = (num_tokens + message.head["num_offsets"]) * _TOKEN_BYTES
    numbers = array("I")
    numbers.frombytes(memoryview(message.rest)[:end])
    echo = message.rest[end:].decode()
    return Prompt(tuple(numbers[:num_tokens]), echo, tuple(numbers[num_tokens:]))


def unpack_plan(head: Mapping[str, Any], prompts: Sequence[Prompt]) -> RequestPlan:
    """Return the plan of its first message's head, with its prompts."""
    per_prompt = head["choices_per_prompt"]
    choices, rules = list[ChoicePlan](), _rules(head["rules"])
    grammar = None if head["grammar"] is None else grammar_of_fields(head["grammar"])
    for index, choice in enumerate(head["choices"]):
        token_ids, echo, offsets = prompts[index // per_prompt]
        choices.append(
            ChoicePlan(
                prompt_token_ids=token_ids,
                sampling=_sampling({**choice["sampling"], "grammar": grammar, "rules": rules}),
                priority=choice["priority"],
                echo=echo,
                echo_offsets=offsets,
            )
        )
    return RequestPlan(
        choices=tuple(choices),
        choices_per_prompt=per_prompt,
        returned_per_prompt=head["returned_per_prompt"],
        stop=tuple(head["stop"]),
        hidden_token_ids=frozenset(head["hidden_token_ids"]),
        stop_token_ids=frozenset(head["stop_token_ids"]),
        shows_stop=head["shows_stop"],
        shows_special_tokens=head["shows_special_tokens"],
        has_logprobs=head["has_logprobs"],
        returns_token_ids=head["returns_token_ids"],
        is_stream=head["is_stream"],
        cache_salt=head["cache_salt"],
        usage_events=UsageEvents(head["usage_events"]),
        continues_prompt=head["continues_prompt"],
        syntax=_syntax(head["syntax"]),
        repeated=head["repeated"],
        ignored_fields=tuple(head["ignored_fields"]),
        left_out=tuple(head["left_out"]),
        client_tools={name: ClientTool(*tool) for name, tool in head["client_tools"].items()},
        prompt_logprobs=head["prompt_logprobs"],
        echo_logprobs=head["echo_logprobs"],
        has_output=head["has_output"],
        grammar_parts=parts_of(head["grammar_parts"]),
    )


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


def _syntax(fields: Mapping[str, Any]) -> AnswerSyntax:
    decoded = {
        "thinking": ThinkingFormat(fields["thinking"]),
        "call_names": tuple(fields["call_names"]),
    }
    return AnswerSyntax(**{**fields, **decoded})


def _rules(described: Mapping[str, Any]) -> TokenRules:
    return TokenRules(
        biases=tuple((token_id, bias) for token_id, bias in described["biases"]),
        bad_words=tuple(tuple(word) for word in described["bad_words"]),
        allowed_token_ids=tuple(described["allowed_token_ids"]),
    )


def _own_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the parameters without those that all choices share, which can be long."""
    fields = asdict(replace(sampling, grammar=None, rules=NO_RULES))
    del fields["grammar"], fields["rules"]
    return fields


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return SamplingParams(**given)


assert array("I").itemsize == _TOKEN_BYTES, sys.platform
