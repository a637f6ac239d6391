"""Puts the words of `api_texts` into the description of the API. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from router.http.api_texts import EXAMPLES, FIELDS, GROUPS, Body
from router.http.described import JSON, with_schemas

Described = dict[str, Any]


class ServedModel(NamedTuple):
    """The model's name, and whether it has a chat template: the bodies to send depend on them."""

    name: str
    can_chat: bool
    knows_tools: bool

    def answers(self, body: Described) -> bool:
        """Return whether the model can be asked with this body."""
        is_chat = "messages" in body or "input" in body
        return (self.can_chat or not is_chat) and (self.knows_tools or "tools" not in body)


def documented_api(described: Described, model: ServedModel) -> Described:
    """Return the OpenAPI description with groups, fields and bodies that `model` answers.

    Raises `KeyError` for a field that `api_texts` has no words for, and `ValueError` for two types
    of answers with one name.
    """
    named: Described = {}
    paths = {
        path: {
            method: _operation(operation, EXAMPLES.get(path, {}), model)
            for method, operation in methods.items()
        }
        for path, methods in with_schemas(described["paths"]).items()
    }
    tags = [{"name": name, "description": text} for name, text in GROUPS.items()]
    return {
        **described,
        "paths": _without_types(paths, named),
        "components": {"schemas": dict(sorted(named.items()))},
        "tags": tags,
    }


def _without_types(part: Any, named: Described) -> Any:
    """Return a part whose schemas only name types: what stands for these is put into `named`."""
    if isinstance(part, list):
        return [_without_types(one, named) for one in part]
    if not isinstance(part, dict):
        return part
    for name, schema in part.get("$defs", {}).items():
        if named.setdefault(name, schema) != schema:
            raise ValueError(f"two types of answers have the name {name}")
    return {key: _without_types(one, named) for key, one in part.items() if key != "$defs"}


def _operation(operation: Described, bodies: Mapping[str, Body], model: ServedModel) -> Described:
    if "requestBody" not in operation:
        return operation
    schema = operation["requestBody"]["content"][JSON]["schema"]
    content: Described = {"schema": {**_with_texts(schema), "title": operation["summary"]}}
    examples = {
        name: {"summary": name, "value": {"model": model.name, **body}}
        for name, body in bodies.items()
        if model.answers(body)
    }
    if examples:
        content["examples"] = examples
    return {**operation, "requestBody": {**operation["requestBody"], "content": {JSON: content}}}


def _with_texts(schema: Any) -> Any:
    """Return a schema whose fields say what they mean, at every depth."""
    if isinstance(schema, list):
        return [_with_texts(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    told = {key: _with_texts(part) for key, part in schema.items() if key != "properties"}
    if "properties" in schema:
        told["properties"] = dict(_fields(schema["properties"]))
    return told


def _fields(properties: Described) -> Iterator[tuple[str, Described]]:
    for name, field in properties.items():
        yield name, {**_with_texts(field), "description": FIELDS[name]}
