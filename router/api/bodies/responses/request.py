"""From a body of `/v1/responses` to the body of a chat.

The server keeps no responses, so the client sends the whole conversation as `input`. An item of
thinking, a message of the assistant and calls that follow each other are one turn of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from common.errors import InvalidRequest
from router.api.bodies.places import Places
from router.api.bodies.schemas import Nothing, StreamOptions, WholeBody
from router.http.sse import to_json

Turn = dict[str, Any]

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


def chat_of_response(body: ResponseBody, places: Places) -> dict[str, Any]:
    """Return the body of a chat that asks for the same, and note the `places` of its parts.

    Raises `InvalidRequest`.
    """
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    conversation = _Conversation(places)
    if body.instructions is not None:
        conversation.add_text("system", body.instructions, "instructions")
    if isinstance(body.input, str):
        conversation.add_text("user", body.input, "input")
    else:
        for index, item in enumerate(body.input):
            conversation.add(item, f"input.{index}")
    text, reasoning = body.text or {}, body.reasoning or {}
    return chat | {
        "messages": conversation.turns,
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(text.get("format")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "tools": None if body.tools is None else _tools(body.tools, "tools", "tools", places),
        "tool_choice": _tool_choice(body.tool_choice, places),
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
        name: default if given[name] is None else given[name] for name, default in defaults.items()
    }


class _Conversation:
    """The turns of a chat that items of the input become, and the places of these items."""

    def __init__(self, places: Places) -> None:
        self.turns: list[Turn] = []
        self._places = places

    def add_text(self, role: str, text: str, field: str) -> None:
        """Add a text that is a turn of its own."""
        self.turns.append({"role": role, "content": text})
        self._note(field, content=field)

    def add(self, item: Any, field: str) -> None:
        """Add an item of the input. Raises `InvalidRequest`."""
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{field} is not an object", param=field)
        match item.get("type", "message"):
            case "message":
                self._add_message(item, field)
            case "function_call":
                self._add_call(item, field)
            case "function_call_output":
                output = _content(item.get("output"), f"{field}.output")
                turn = {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
                self.turns.append(turn)
                self._note(field, content=f"{field}.output", tool_call_id=f"{field}.call_id")
            case "reasoning":
                thought = _thought(item, field)
                if thought:
                    self.turns.append({"role": "assistant", "reasoning_content": thought})
            case kind:
                wanted = "message, function_call, function_call_output or reasoning"
                raise InvalidRequest(
                    f"{field}.type is {str(kind)[:64]!r}: wanted {wanted}", param=f"{field}.type"
                )

    def _add_message(self, item: Mapping[str, Any], field: str) -> None:
        content = _content(item.get("content"), f"{field}.content")
        role = item.get("role")
        if role == "assistant":
            self._assistant()["content"] = content
        else:
            self.turns.append({"role": role, "content": content})
        self._note(field, content=f"{field}.content")

    def _add_call(self, item: Mapping[str, Any], field: str) -> None:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        calls = self._assistant(is_call=True).setdefault("tool_calls", [])
        calls.append(call)
        path = f"messages.{len(self.turns) - 1}.tool_calls.{len(calls) - 1}"
        self._places.put(f"{path}.function", field)
        self._places.put(f"{path}.id", f"{field}.call_id")

    def _assistant(self, *, is_call: bool = False) -> Turn:
        """Return the turn that an item of the assistant belongs to, which may be a new one."""
        last = self.turns[-1] if self.turns else None
        if last is not None and last["role"] == "assistant":
            is_open = is_call or not ("content" in last or "tool_calls" in last)
            if is_open:
                return last
        self.turns.append({"role": "assistant"})
        return self.turns[-1]

    def _note(self, field: str, **places: str) -> None:
        """Note that the last turn comes from `field`, and its parts from `places`."""
        path = f"messages.{len(self.turns) - 1}"
        self._places.put(path, field)
        for name, place in places.items():
            self._places.put(f"{path}.{name}", place)


def _content(content: Any, field: str) -> Any:
    """Return the content of a message with the parts' types under their names in chats."""
    if not isinstance(content, list):
        return content
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            parts.append(part)
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


def _tools(tools: list[Any], path: str, field: str, places: Places) -> list[Any]:
    """Return the tools at `field` as chats have them at `path`."""
    return [
        _tool(tool, f"{path}.{index}", f"{field}.{index}", places)
        for index, tool in enumerate(tools)
    ]


def _tool(tool: Any, path: str, field: str, places: Places) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool
    places.put(f"{path}.function", field)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Any, places: Places) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            path = "tool_choice.allowed_tools.tools"
            tools = _tools(tools, path, "tool_choice.tools", places)
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": tools},
        }
    return choice
