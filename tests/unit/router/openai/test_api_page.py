"""The table of fields in docs/api.md is the one of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router.openai.schemas import ChatBody, CompletionBody, SamplingFields

PAGE = Path(__file__).resolve().parents[4] / "docs" / "api.md"
ROW = re.compile(r"^\| (`.+?`) \| (\S+) \| (\S+) \|", re.MULTILINE)


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
