"""Models that are odd in several ways, through `pdserve up`; `make test-models` has each way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.odd_models import check_chats, check_completions, make_odd_model, served

SHELVES = {
    "ends by its tokenizer, which is too large": (
        "ends by its tokenizer",
        "has one special token too many",
        "keeps one token by default",
        "takes one system message",
    ),
    "ends beyond its vocabulary, and drops spaces": (
        "has the tokenizer of SentencePiece",
        "has one plain token too many",
        "has an end beyond the vocabulary",
        "has floats for whole numbers",
    ),
}


@pytest.mark.covers("K07", "K08", "K09")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHELVES)
def test_an_odd_model_serves_all_kinds_of_answers(name: str, tmp_path: Path) -> None:
    model = make_odd_model(tmp_path / "odd", *SHELVES[name])
    with served(model, tmp_path) as client:
        check_completions(client)
        check_chats(client)
