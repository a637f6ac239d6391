"""The messages of Anthropic's API as turns of a chat.

A message of the user may hold results of calls: they become messages of the role `tool`, before the
text beside them. A message of the system may stand among the others. Blocks that record what
Anthropic's server did by itself are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import InvalidRequest
from router.api.bodies.places import Places
from router.api.bodies.schemas import data_as_text
from router.api.bodies.unknown_fields import LeftOut

Turn = dict[str, Any]

_FAILED = "Error:"
"""What begins the result of a call that failed."""
_THOUGHTS = ("reasoning_content", "reasoning")
"""The fields of chats with the reasoning of a message, where it is no block of it."""
_OF_SERVER = ("container_upload", "compaction")


class MessageTurns:
    """The turns of a chat that messages become, and the places of these messages and blocks."""

    def __init__(self, places: Places, left_out: LeftOut) -> None:
        """Begin without a turn."""
        self._turns: list[Turn] = []
        self._places = places
        self._left_out = left_out
        self._first_left_out: str | None = None

    def ended(self) -> list[Turn]:
        """Return all turns. Raises `InvalidRequest` where messages held only what is left out."""
        if not self._turns and self._first_left_out is not None:
            field = self._first_left_out
            raise InvalidRequest(f"{field} is a record of another server: wanted text", param=field)
        return self._turns

    def add_system(self, system: Any) -> None:
        """Add the text, or the blocks of text, that come before all messages."""
        self._begin("system", "system", content="system")["content"] = _texts(system, "system")

    def add(self, message: Any, field: str) -> None:
        """Add a message, which may be several turns or none. Raises `InvalidRequest`."""
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(
                f"{field}.role is {str(role)[:40]!r}: wanted user, assistant or system",
                param=f"{field}.role",
            )
        content, num_before = message.get("content"), len(self._turns)
        if role == "system":
            if content != []:  # one without text asks for nothing that is served
                self._begin(role, field)["content"] = _texts(content, f"{field}.content")
        elif not isinstance(content, list):
            self._begin(role, field)["content"] = content
        elif role == "assistant":
            self._add_answered(content, field)
        else:
            self._add_asked(content, field)
        if role == "assistant" and len(self._turns) > num_before:
            turn = self._turns[-1]
            if "reasoning_content" not in turn:  # it has no block of thinking
                turn |= {name: message[name] for name in _THOUGHTS if name in message}

    def _add_answered(self, content: list[Any], field: str) -> None:
        """Add the turn of the assistant: what it thought, its text and its calls."""
        kept = self._kept(content, field)
        if content and not kept:
            return
        turn, texts = self._begin("assistant", field), {}
        for where, block in kept.items():
            kind = _kind(block)
            if kind == "tool_use":
                self._add_call(block, where)
            elif kind == "thinking":
                thought = block.get("thinking", "")
                if not isinstance(thought, str):
                    raise InvalidRequest(f"{where}.thinking is not text", param=f"{where}.thinking")
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
            elif kind != "redacted_thinking":  # which no template can read
                texts[where] = _text(block, where)
        self._add_texts(texts)
        turn["content"] = turn["content"] or None

    def _add_call(self, block: Mapping[str, Any], field: str) -> None:
        function = {"name": block.get("name"), "arguments": block.get("input")}
        calls = self._turns[-1].setdefault("tool_calls", [])
        calls.append({"id": block.get("id"), "type": "function", "function": function})
        path = f"{self._path}.tool_calls.{len(calls) - 1}"
        self._places.put(path, field)
        self._places.put(f"{path}.function", field)
        self._places.put(f"{path}.function.arguments", f"{field}.input")

    def _add_asked(self, content: list[Any], field: str) -> None:
        """Add the results of calls, and then what the user says."""
        kept = self._kept(content, field)
        texts, is_left_out = {}, len(content) > len(kept)
        has_results = False
        for where, block in kept.items():
            if _kind(block) == "tool_result":
                has_results = True
                turn = self._begin("tool", where, tool_call_id=f"{where}.tool_use_id")
                turn["content"] = _result(block, f"{where}.content")
                turn["tool_call_id"] = block.get("tool_use_id")
            else:
                texts[where] = _text(block, where)
        if texts or not (has_results or is_left_out):
            self._begin("user", field)
            self._add_texts(texts)

    def _kept(self, content: list[Any], field: str) -> dict[str, Any]:
        """Return the blocks that are not left out, under their places."""
        kept = {}
        for index, block in enumerate(content):
            kind, where = _kind(block), f"{field}.content.{index}"
            if isinstance(kind, str) and _is_of_server(kind):
                self._left_out.add_type("content blocks", kind)
                self._first_left_out = self._first_left_out or where
            else:
                kept[where] = block
        return kept

    def _add_texts(self, texts: Mapping[str, Any]) -> None:
        """Make texts, under their places, the content of the last turn."""
        self._turns[-1]["content"] = list(texts.values())
        for number, place in enumerate(texts):
            self._places.put(f"{self._path}.content.{number}", place)

    def _begin(self, role: str, field: str, **places: str) -> Turn:
        """Return a new turn that comes from `field`, and its parts from `places`."""
        self._turns.append({"role": role})
        self._places.put(self._path, field)
        for name, place in places.items():
            self._places.put(f"{self._path}.{name}", place)
        return self._turns[-1]

    @property
    def _path(self) -> str:
        """Where the last turn is in the chat."""
        return f"messages.{len(self._turns) - 1}"


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else None


def _is_of_server(kind: str) -> bool:
    """Return whether a block tells of a tool that Anthropic's server ran, and of its result."""
    return kind in _OF_SERVER or kind.endswith(("_tool_use", "_tool_result"))


def _result(result: Mapping[str, Any], field: str) -> Any:
    """Return what a tool returned. What is no text of images and documents stays as it is.

    Chats have no other place for what says that it failed.
    """
    content = data_as_text(result.get("content")) or ""
    if isinstance(content, list):
        content = [
            block if _is_medium(block) else _text(block, f"{field}.{index}")
            for index, block in enumerate(content)
        ]
    return _failed(content) if result.get("is_error") is True else content


def _failed(content: str | list[Any]) -> str | list[Any]:
    """Return what a call that failed returned, with words that say so before it."""
    if isinstance(content, str):
        return f"{_FAILED}\n{content}"
    first, *others = content
    if _is_medium(first):
        return [{"type": "text", "text": _FAILED}, *content]
    if isinstance(first["text"], str):  # what is no text is found later, and named by its place
        first = first | {"text": _failed(first["text"])}
    return [first, *others]


def _is_medium(block: Any) -> bool:
    kind = _kind(block)
    return kind == "image" or (kind == "document" and not _is_text(block.get("source")))


def _is_text(source: Any) -> bool:
    """Return whether the source of a document is text, as it is or in blocks."""
    return _kind(source) in ("text", "content")


def _texts(content: Any, field: str) -> Any:
    if not isinstance(content, list):
        return content
    return [_text(block, f"{field}.{index}") for index, block in enumerate(content)]


def _text(block: Any, field: str) -> dict[str, Any]:
    """Return a block as text. Raises `InvalidRequest` for one that is none."""
    if not isinstance(block, Mapping):
        raise InvalidRequest(
            f'{field} is not a content block: wanted {{"type": "text", "text": …}}', param=field
        )
    match _kind(block):
        case "text":
            return {"type": "text", "text": block.get("text")}
        case "tool_reference":  # each tool is told to the model, so its name says which is meant
            return {"type": "text", "text": _string(block, "tool_name", field)}
        case "search_result":
            lines = [_string(block, name, field) for name in ("title", "source")]
            lines += _lines(block.get("content") or [], f"{field}.content")
            return {"type": "text", "text": "\n".join(lines)}
        case "document":
            return {"type": "text", "text": _document(block, field)}
        case kind:
            raise InvalidRequest(
                f"{field}.type is {str(kind)[:40]!r}: this server takes text alone",
                param=f"{field}.type",
            )


def _document(block: Mapping[str, Any], field: str) -> str:
    """Return title, context and text of a document. Raises `InvalidRequest` for one of no text."""
    source, place = block.get("source"), f"{field}.source"
    if not isinstance(source, Mapping) or not _is_text(source):
        told = (source.get("type"), source.get("media_type")) if isinstance(source, Mapping) else ()
        shown = " ".join(str(one) for one in told if one is not None)
        raise InvalidRequest(
            f"{place} is {shown[:80]!r}: this server takes text alone: wanted the "
            "document's text, in a source of the type text or content",
            param=place,
        )
    lines = [
        _string(block, name, field) for name in ("title", "context") if block.get(name) is not None
    ]
    if source["type"] == "text":
        return "\n".join([*lines, _string(source, "data", place)])
    content = source.get("content")
    texts = [content] if isinstance(content, str) else _lines(content, f"{place}.content")
    return "\n".join([*lines, *texts])


def _lines(content: Any, field: str) -> list[str]:
    """Return the texts of blocks. Raises `InvalidRequest` for what is no list of them."""
    texts = _texts(content, field)
    if not isinstance(texts, list):
        raise InvalidRequest(f"{field} is not a list", param=field)
    return [_string(text, "text", f"{field}.{index}") for index, text in enumerate(texts)]


def _string(block: Mapping[str, Any], name: str, field: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}.{name} is not text", param=f"{field}.{name}")
    return value
