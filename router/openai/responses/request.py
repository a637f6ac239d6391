"""From a body of `/v1/responses` to the body of a chat.

The server keeps no responses, so the client sends the whole conversation as `input`. An item of
thinking, a message of the assistant and calls that follow each other are one turn of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from common.errors import InvalidRequest
from router.http.sse import to_json
from router.openai.schemas import Nothing, StreamOptions, WholeBody

Turn = dict[str, Any]

CHAT_FIELDS = {
    "input": "messages",
    "max_output_tokens": "max_completion_tokens",
    "text.format": "response_format",
}
"""Fields under the names that chats have for them, for errors."""

_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed", "stop", "top_k"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "priority", "chat_template_kwargs"),
)


class ResponseBody(WholeBody):
    """`POST /v1/responses`. The sampling fields that OpenAI does not have are those of chats."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        (
            *("metadata", "store", "user", "service_tier", "safety_identifier", "include"),
            *("prompt_cache_key", "prompt_cache_retention", "max_tool_calls", "truncation"),
        )
    )
    not_supported: ClassVar[Mapping[str, Nothing]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "background": (None, False),
        "top_logprobs": (None, 0),
        "context_management": (None, []),
    }

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    stream_options: StreamOptions | None = None
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


def chat_of_response(body: ResponseBody) -> dict[str, Any]:
    """Return the body of a chat that asks for the same. Raises `InvalidRequest`."""
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    messages = [] if body.instructions is None else [_turn("system", body.instructions)]
    if isinstance(body.input, str):
        messages.append(_turn("user", body.input))
    else:
        for index, item in enumerate(body.input):
            _add(messages, item, f"input.{index}")
    text, reasoning = body.text or {}, body.reasoning or {}
    return chat | {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(text.get("format")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
    }


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
    for name, value in given.items():
        try:
            to_json(value)
        except ValueError:
            raise InvalidRequest(
                f"{name} has a number that is not finite, which no answer can repeat", param=name
            ) from None
    return {
        name: default if given[name] is None else given[name] for name, default in defaults.items()
    }


def _turn(role: str, content: Any) -> Turn:
    return {"role": role, "content": content}


def _add(messages: list[Turn], item: Any, field: str) -> None:
    """Add an item of the input to the conversation."""
    if not isinstance(item, Mapping):
        raise InvalidRequest(f"{field} is not an object", param=field)
    kind = item.get("type", "message")
    if kind == "message":
        content = _content(item.get("content"), f"{field}.content")
        role = item.get("role")
        if role == "assistant":
            _assistant(messages)["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages, is_call=True).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{field}.output")
        messages.append(_turn("tool", output) | {"tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        thought = _thought(item, field)
        if thought:
            messages.append({"role": "assistant", "reasoning_content": thought})
    else:
        wanted = "message, function_call, function_call_output or reasoning"
        raise InvalidRequest(
            f"{field}.type is {str(kind)[:64]!r}: wanted {wanted}", param=f"{field}.type"
        )


def _assistant(messages: list[Turn], *, is_call: bool = False) -> Turn:
    """Return the turn that an item of the assistant belongs to, which may be a new one."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant":
        is_open = is_call or not ("content" in last or "tool_calls" in last)
        if is_open:
            return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: Any, field: str) -> Any:
    """Return the content of a message with the parts' types under their names in chats."""
    if not isinstance(content, list):
        return content
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            parts.append({"type": "text", "text": part.get("refusal")})
        elif kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": part.get("text")})
        else:
            where = f"{field}.{index}.type"
            raise InvalidRequest(
                f"{where} is {str(kind)[:40]!r}: this server takes text alone", param=where
            )
    return parts


def _thought(item: Mapping[str, Any], field: str) -> str:
    content, texts = item.get("content"), []
    if content is not None and not isinstance(content, list):
        raise InvalidRequest(f"{field}.content is not a list of parts", param=f"{field}.content")
    for part in content or ():
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{field}.content has no text", param=f"{field}.content")
        texts.append(text)
    return "".join(texts)


def _format(form: Any) -> Any:
    """Return `text.format` as chats have it: what describes a schema is one level deeper there."""
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    described = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": described}


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        tools = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": tools},
        }
    return choice
