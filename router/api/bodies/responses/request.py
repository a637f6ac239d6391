"""From a body of `/v1/responses` to the body of a chat.

The server keeps no responses, so the client sends the whole conversation as `input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from common.errors import InvalidRequest
from router.api.bodies.client_tools import ClientTool
from router.api.bodies.places import Places
from router.api.bodies.responses.conversation import ResponseTurns
from router.api.bodies.responses.tools import Tools
from router.api.bodies.schemas import Maybe, Nothing, StreamOptions, Whole, WholeBody
from router.api.bodies.thought_codes import INCLUDED
from router.api.bodies.unknown_fields import LeftOut
from router.http.sse import to_json

PLACES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Fields of a chat, and where a client has them, for errors."""

_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed", "stop", "top_k"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "priority", "chat_template_kwargs", "stream_options"),
)


class ResponseBody(WholeBody):
    """`POST /v1/responses`. The sampling fields that OpenAI does not have are those of chats."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        (
            *("metadata", "store", "service_tier", "safety_identifier"),
            *("prompt_cache_retention", "max_tool_calls", "truncation"),
        )
    )
    not_supported: ClassVar[Mapping[str, Nothing]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "background": (None, False),
        "top_logprobs": (None, 0),
    }
    left_out: ClassVar[Mapping[str, Nothing]] = {"context_management": (None, [])}

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    text: Maybe[dict[str, Any]] = None
    reasoning: Maybe[dict[str, Any]] = None
    include: Any = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    stream_options: Maybe[StreamOptions] = None
    model: Any = None
    stream: Any = None
    temperature: Any = None
    top_p: Any = None
    parallel_tool_calls: Any = None
    seed: Any = None
    stop: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None


def chat_of_response(
    body: ResponseBody, places: Places, left_out: LeftOut
) -> tuple[dict[str, Any], Mapping[str, ClientTool]]:
    """Return the body of a chat that asks for the same, and what the client calls functions that
    it knows as other tools.

    Notes the `places` of its parts, and what was left out. Raises `InvalidRequest`.
    """
    text, reasoning = body.text or {}, body.reasoning or {}
    chat: dict[str, Any] = {
        **{name: getattr(body, name) for name in _SAME},
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(text.get("format")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
    }
    tools = Tools(places, left_out)
    for index, tool in enumerate(body.tools or ()):
        tools.add(tool, f"tools.{index}")
    conversation = ResponseTurns(places, left_out, tools)
    if body.instructions is not None:
        conversation.add_text("system", body.instructions, "instructions")
    if isinstance(body.input, str):
        conversation.add_text("user", body.input, "input")
    else:
        for index, item in enumerate(body.input):
            conversation.add(item, f"input.{index}")
    functions = tools.ended()
    fields = {
        "messages": conversation.ended(),
        "tools": functions or None,
        "tool_choice": tools.choice(body.tool_choice),
    }
    return chat | fields, tools.client_tools


def wants_codes(body: ResponseBody) -> bool:
    """Return whether items of thinking have a code; what else a client may include is ignored."""
    return isinstance(body.include, list) and INCLUDED in body.include


def repeated_fields(body: ResponseBody) -> dict[str, Any]:
    """Return the fields of a request that its response has too, with their defaults.

    Raises `InvalidRequest` for a number that is not finite: no answer could have it.
    """
    defaults: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "user": None,
    }
    given = {name: getattr(body, name, None) for name in defaults}
    given |= {name: value for name, value in (body.model_extra or {}).items() if name in defaults}
    if body.text is not None:
        given["text"] = body.text | {"format": body.text.get("format") or {"type": "text"}}
    for name, value in given.items():
        try:
            to_json(value)
        except ValueError:
            raise InvalidRequest(
                f"{name} has a number that is not finite, which no answer can repeat", param=name
            ) from None
    return {
        name: default if given[name] in (None, []) else given[name]
        for name, default in defaults.items()
    }


def _format(form: Any) -> Any:
    """Return `text.format` as chats have it: what describes a schema is one level deeper there."""
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    described = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}
