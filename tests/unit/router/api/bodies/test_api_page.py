"""The table of fields in docs/api.md is the one of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from common import errors
from router.api.bodies.asked import EVERYWHERE
from router.api.bodies.messages.request import MessageBody
from router.api.bodies.responses.request import ResponseBody
from router.api.bodies.schemas import ChatBody, CompletionBody, SamplingFields, WholeBody
from router.http.errors import api_error
from router.text.context_limits import ContextExceeded
from tests.unit.tree import ROOT, nodes, parsed

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


def statuses_of_typed_errors() -> set[tuple[int, str]]:
    """The status and the code of each error that ends a request."""
    made = [kind("") for kind in vars(errors).values() if isinstance(kind, type)]
    not_of_requests = (errors.ConfigError, errors.CheckpointError, errors.LastInRole)
    ending = [
        error for error in (*made, ContextExceeded("")) if not isinstance(error, not_of_requests)
    ]
    return {(shown.status, shown.code) for shown in map(api_error, ending)}


def statuses_of_the_edge() -> set[tuple[int, str]]:
    """The status and the code of each `ApiError` that the router's code makes."""
    found = set()
    for path in (ROOT / "router").rglob("*.py"):
        for node in nodes(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                status = node.args[0]
                codes = [one.value for one in node.keywords if one.arg == "code"]
                if (
                    codes
                    and isinstance(status, ast.Constant)
                    and isinstance(codes[0], ast.Constant)
                ):
                    found.add((int(str(status.value)), str(codes[0].value)))
    return found


def test_each_error_is_in_the_table() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("\n## Errors\n")[2].partition("\n\n429")[0]
    rows = re.findall(r"^\| (\d+) \| (.+?) \| ", table, re.MULTILINE)
    shown = [
        (int(status), code) for status, names in rows for code in re.findall(r"`(\w+)`", names)
    ]
    assert len(shown) == len(set(shown))
    of_routes = {(404, "not_found"), (405, "method_not_allowed")}
    of_admins = {(409, "stale_epoch"), (409, "draining")}
    known = statuses_of_typed_errors() | statuses_of_the_edge() | of_routes | of_admins
    assert set(shown) == known
