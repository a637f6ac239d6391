"""The table of fields in docs/api.md is the one of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router.api.bodies.asked import EVERYWHERE
from router.api.bodies.messages.request import MessageBody
from router.api.bodies.responses.request import ResponseBody
from router.api.bodies.schemas import ChatBody, CompletionBody, SamplingFields, WholeBody

PAGE = Path(__file__).resolve().parents[5] / "docs" / "api.md"
ROW = re.compile(r"^\| (`.+?`) \| (\S+) \| (\S+) \|", re.MULTILINE)

PEERS = re.compile(r"^\| `.+?` \| \S+ \| \S+ \| ([^|]+) \| ([^|]+) \| ", re.MULTILINE)


def table(column: int) -> dict[str, str]:
    """What becomes of each field in chats (0) or completions (1)."""
    text = PAGE.read_text(encoding="utf-8")
    fields: dict[str, str] = {}
    for names, *treated in ROW.findall(text.partition("## Answers")[0]):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in fields, name
            fields[name] = treated[column]
    return {name: how for name, how in fields.items() if how != "–"}


@pytest.mark.parametrize(("column", "body"), [(0, ChatBody), (1, CompletionBody)])
def test_each_field_is_in_the_group_that_the_page_names(
    column: int, body: type[SamplingFields]
) -> None:
    of_code = dict.fromkeys(body.model_fields, "served")
    of_code |= dict.fromkeys(body.harmless, "ignored")
    of_code |= dict.fromkeys(body.not_supported, "refused")
    assert table(column) == of_code


def test_each_field_is_compared_with_other_servers() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8").partition("## Answers")[0])
    compared = PEERS.findall(PAGE.read_text(encoding="utf-8").partition("## Answers")[0])
    assert len(rows) == len(compared) > 40
    assert {cell for cells in compared for cell in cells} <= {
        *("yes", "–", "ignored", "accepted", "earlier", "smaller first", "larger first")
    }


def row_of(path: str) -> tuple[set[str], ...]:
    """The fields that the page names as served, ignored, left out and refused by another API."""
    text = PAGE.read_text(encoding="utf-8").partition("## Other APIs")[2]
    row = re.findall(rf"^\| `{path}` \|(.+)\|$", text, re.MULTILINE)[0]
    return tuple(set(re.findall(r"`(\w+)", cell)) for cell in row.split(" | "))


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", ResponseBody), ("/v1/messages", MessageBody)]
)
def test_each_field_of_another_api_is_in_its_row(path: str, body: type[WholeBody]) -> None:
    served, ignored, left_out, refused = row_of(path)
    # Declared only to check its type.
    assert set(body.model_fields) - {"stream_options"} | set(EVERYWHERE) <= served
    assert ignored - {"stream_options"} == body.harmless
    assert left_out == set(body.left_out)
    assert refused == set(body.not_supported)
