"""What of a tokenizer's files routers and nodes read alike: its end, and the tokens of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from common.errors import CheckpointError
from common.files.tokenizer_files import (
    known_ids,
    plain_tokens_digest,
    tokenizer_end_ids,
    within_vocabulary,
)
from common.grammar import Grammar, GrammarKind
from engine.runner.weights.model_spec import read_eos_token_ids
from grammars.compiler import GrammarCompiler
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from router.text.text_model import TextModel
from tests.support.http.edge_model import EOS, write_model_folder
from tests.support.models.tokenizer_gguf import TOKENS, write_tiny_gguf

END = 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path)


def rewrite(path: Path, **fields: Any) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **fields}))


@pytest.mark.covers("K08")
@pytest.mark.parametrize("token", [EOS, {"content": EOS, "special": True}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_of_the_tokenizer_is_an_end(folder: Path, name: str, token: Any) -> None:
    rewrite(folder / "config.json", eos_token_id=7)
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    assert tokenizer_end_ids(folder) == frozenset()
    rewrite(folder / name, eos_token=token)
    assert tokenizer_end_ids(folder) == {END}
    assert read_eos_token_ids(folder) == {END, 7}
    assert TextModel.load(folder, "", 0).eos_token_ids == {END, 7}


def test_the_end_may_be_no_added_token(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", eos_token="z")
    (token,) = tokenizer_end_ids(folder)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(token) == "z"
    rewrite(folder / "tokenizer_config.json", eos_token="<unheard of>")
    assert tokenizer_end_ids(folder) == frozenset()
    layout = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}}
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    rewrite(folder / "tokenizer_config.json", eos_token="</s>")
    assert tokenizer_end_ids(folder) == {1}


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_file_that_is_no_json_is_named(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        tokenizer_end_ids(folder)


def vocabulary_of(folder: Path, vocab: Any) -> str:
    layout = {"model": {"type": "BPE", "vocab": vocab}}
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    return plain_tokens_digest(folder)


@pytest.mark.covers("M08")
def test_a_tokenizer_is_told_apart_by_its_words_alone(folder: Path) -> None:
    known = vocabulary_of(folder, {"a": 5, "of": 9, "2": 3})
    assert known
    assert known == vocabulary_of(folder, {"2": 3, "of": 9, "a": 5})
    assert known == vocabulary_of(
        folder, {"a": 5, "of": 9, "2": 3, "<s>": 1, "\u0120of": 7, "[PAD17]": 17, "\u00e9": 8}
    ), "what forms of one tokenizer write in different ways"
    assert known != vocabulary_of(folder, {"a": 9, "of": 5, "2": 3})
    assert known != vocabulary_of(folder, {"a": 5, "of": 9, "2": 3, "to": 4})
    pieces = [["<unk>", 0.0], ["a", -1.0], ["of", -2.0]]
    assert vocabulary_of(folder, pieces) == vocabulary_of(folder, {"a": 1, "of": 2})


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": 1}'])
def test_of_a_tokenizer_that_cannot_be_read_nothing_is_known(
    folder: Path, text: str | None
) -> None:
    path = folder / "tokenizer.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert plain_tokens_digest(folder) == ""


@pytest.mark.covers("M08")
def test_a_gguf_file_has_the_words_of_the_tokenizer_that_it_was_made_from(tmp_path: Path) -> None:
    words = {token: at for at, token in enumerate(TOKENS) if token[0] not in "<\u0120"}
    folder = tmp_path / "made"
    folder.mkdir()
    make_gguf_folder(write_tiny_gguf(tmp_path / "model.gguf"), folder)
    assert plain_tokens_digest(folder) == vocabulary_of(tmp_path, words)


@pytest.mark.covers("K09")
def test_ends_beyond_the_vocabulary_are_none(folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=[1, 99_999, -1])
    assert TextModel.load(folder, "", 0).eos_token_ids == {END}
    assert known_ids(read_eos_token_ids(folder), 320) == {END}


def larger(folder: Path, *, special: bool) -> int:
    """Add a token that the model does not have; return the model's number of tokens."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    before = tokenizer.get_vocab_size()
    add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
    add([AddedToken("<extra>", special=special)])
    tokenizer.save(str(path))
    return before


@pytest.mark.covers("K09")
@pytest.mark.parametrize("special", [False, True])
def test_constrained_answers_need_no_token_that_the_model_lacks(
    folder: Path, special: bool
) -> None:
    size = larger(folder, special=special)
    compiler = GrammarCompiler.load(folder, size, {END})
    assert compiler is not None
    assert compiler.tokenizer.vocab_size == size
    text = Grammar(GrammarKind.LARK, 'start: "a<extra>b"', "x")
    matcher = compiler.matcher(text)
    tokens = compiler.tokenizer.tokenize_str("a<extra>b")
    assert max(tokens) < size
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    model = TextModel.load(folder, "", 0)
    ids = model.encode("a<extra>b", add_special_tokens=False, param="prompt")
    assert max(ids) < size
    assert model.decode(ids) == "a<extra>b"


def test_merges_of_tokens_that_are_gone_go_too(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    size = Tokenizer.from_str(text).get_vocab_size() - 30
    for merges in ("lists", "texts"):
        layout = json.loads(text)
        if merges == "texts":
            layout["model"]["merges"] = [" ".join(pair) for pair in layout["model"]["merges"]]
        cut = within_vocabulary(json.dumps(layout), size)
        tokenizer = Tokenizer.from_str(cut)
        assert max(tokenizer.get_vocab().values()) == size - 1
        assert tokenizer.decode(tokenizer.encode("Hello world, the quick").ids) == (
            "Hello world, the quick"
        )
        LLTokenizer(cut, n_vocab=size, eos_token=[END])


def test_a_tokenizer_that_fits_stays_as_it_is(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    assert within_vocabulary(text, 320) is text
    assert within_vocabulary(text, 5000) is text
    smaller = GrammarCompiler.load(folder, 5000, {END})
    assert smaller is not None
    smaller.matcher(Grammar(GrammarKind.REGEX, "[0-9]{3}", "x"))


def test_pieces_of_a_unigram_model_are_cut() -> None:
    layout = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", 0.0]]}, "added_tokens": []}
    assert json.loads(within_vocabulary(json.dumps(layout), 1))["model"]["vocab"] == [["a", 0.0]]
