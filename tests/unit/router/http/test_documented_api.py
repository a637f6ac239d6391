"""`/docs` groups and titles every endpoint, explains every field, and has bodies that work."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typing_extensions import TypedDict

from router.http.api_texts import EXAMPLES, FIELDS, GROUPS
from router.http.described import good_response
from router.http.documented_api import ServedModel, documented_api
from router.http.probes import Health
from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel
from tests.support.http.edge_model import write_model_folder
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.tool_models import model_with

PAGE = Path(__file__).resolve().parents[4] / "docs" / "api.md"


async def description(edge: Edge) -> Any:
    async with edge.client() as client:
        return (await client.get("/openapi.json")).json()


def operations(described: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def fields(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every property at every depth, with its name."""
    for part in schema if isinstance(schema, list) else ():
        yield from fields(part)
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
        for part in [*schema.get("properties", {}).values(), *schema.values()]:
            yield from fields(part)


async def test_every_endpoint_has_a_group_and_a_title() -> None:
    described = await description(make_edge())
    assert [tag["name"] for tag in described["tags"]] == list(GROUPS)
    found = [one for _, _, one in operations(described)]
    assert {tag for one in found for tag in one["tags"]} == GROUPS.keys()
    titles = [one["summary"] for one in found]
    assert len(set(titles)) == len(titles)
    for path, _, operation in operations(described):
        (group,) = operation["tags"]
        assert group in GROUPS, path
        # Without one, the framework makes a title of the function's name.
        assert operation["summary"] != operation["operationId"].split("_")[0].title(), path


async def test_every_endpoint_is_on_the_page_of_the_api() -> None:
    named = re.findall(
        r"`([^`\n]+)`", PAGE.read_text(encoding="utf-8").partition("## Endpoints")[2]
    )
    on_page = {part.split()[-1] for part in named if "/" in part}
    paths = (await description(make_edge()))["paths"]
    assert {path.partition("/{")[0] for path in paths} <= on_page


async def test_every_field_is_explained_and_every_explanation_is_of_a_field() -> None:
    seen = set()
    for path, _, operation in operations(await description(make_edge())):
        if "requestBody" not in operation:
            continue
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator.check_schema(schema)
        for name, field in fields(schema):
            assert field["description"] == FIELDS[name], (path, name)
            seen.add(name)
    assert seen == FIELDS.keys()


def shown_examples(described: Any) -> Iterator[tuple[str, str, Any]]:
    for path, _, operation in operations(described):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for name, example in content.get("examples", {}).items():
            Draft202012Validator(content["schema"]).validate(example["value"])
            yield path, name, example["value"]


@pytest.mark.parametrize("has_tools", [False, True])
async def test_each_body_works_as_it_is_shown(has_tools: bool, tmp_path: Path) -> None:
    unknown = tmp_path / "calls_in_no_known_format.jinja"
    unknown.write_text("{{ messages[0]['content'] }}{{ tools }}")
    template = "auto" if has_tools else str(unknown)
    edge = make_edge(model=model_with(None, chat=ChatSettings(tool_template=template)))
    examples = list(shown_examples(await description(edge)))
    assert len(examples) == sum(map(len, EXAMPLES.values())) - (not has_tools)
    assert {path for path, _, _ in examples} == EXAMPLES.keys()
    assert ("A tool" in {name for _, name, _ in examples}) is has_tools
    async with edge.client() as client:
        for path, name, body in examples:
            async with asyncio.timeout(30):
                answer = await client.post(path, json=body)
            assert answer.status_code == 200, (path, name, answer.text)


async def test_a_model_without_a_chat_template_is_not_asked_to_chat(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    settings = folder / "tokenizer_config.json"
    settings.write_text("{}")
    for tools in ("", "builtin"):
        model = TextModel.load(folder, "base", 0, ChatSettings(tool_template=tools))
        edge = make_edge(model=model)
        examples = list(shown_examples(await description(edge)))
        assert {path for path, _, _ in examples} == {"/v1/completions", "/tokenize", "/detokenize"}
        async with edge.client() as client:
            for path, _, body in examples:
                assert (await client.post(path, json=body)).status_code == 200


async def test_answers_are_named_and_each_name_is_described_once() -> None:
    described = await description(make_edge())
    paths, named = described["paths"], described["components"]["schemas"]
    content = paths["/v1/models"]["get"]["responses"]["200"]["content"]["application/json"]
    assert content["schema"] == {"$ref": "#/components/schemas/ModelList"}
    assert named["ModelList"]["properties"]["data"]["items"] == {
        "$ref": "#/components/schemas/ModelCard"
    }
    assert set(references(described)) == {f"#/components/schemas/{name}" for name in named}
    assert "$defs" not in str(described)


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        part = list(part.values())
    for one in part if isinstance(part, list) else ():
        yield from references(one)


class NamedTwice:
    class Health(TypedDict):
        """Another type with the name of one that is described."""

        status: int


def test_two_answers_with_one_name_are_refused() -> None:
    paths = {
        path: {"get": {"responses": good_response(kind)}}
        for path, kind in (("/health", Health), ("/other", NamedTwice.Health))
    }
    with pytest.raises(ValueError, match="the name Health"):
        documented_api({"paths": paths}, ServedModel("tiny", can_chat=True, knows_tools=True))
