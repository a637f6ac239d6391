"""Tokenizers of the Llama family in GGUF files: Llama 3's byte-level BPE and SentencePiece BPE."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import CheckpointError
from pdserve.checkpoints.gguf_folder import make_gguf_folder
from pdserve.checkpoints.gguf_sentencepiece import merges_of_scores
from tests.unit.pdserve.checkpoints.llama_tokenizers import (
    LETTERS,
    PIECES,
    llama_3,
    sentencepiece,
)

WriteGguf = Callable[..., Path]


PIECES += ["<0", "x6", "<0x6", "1>"]


def tokenizer_of(write_gguf: WriteGguf, folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    path = write_gguf(metadata, {"token_embd.weight": np.zeros((num_tokens, 32), np.float32)})
    folder.mkdir()
    make_gguf_folder(path, folder)
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer


def best_score_first(text: str) -> list[str]:
    """SentencePiece by its definition: join the pair of the best piece, the leftmost of equals."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        joinable = [
            (PIECES.index(left + right), at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in PIECES
        ]
        if not joinable:
            break
        _, at = min(joinable)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    tokens = []
    for symbol in symbols:
        known = symbol in PIECES or symbol in LETTERS
        tokens += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return tokens


@pytest.mark.parametrize("name", ["llama-bpe", "llama3", "llama-v3"])
def test_llama_3_splits_words_its_own_way(write_gguf: WriteGguf, tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(write_gguf, tmp_path / "hf", llama_3(pre=name))
    text = "I'LL pay 12345\n\n(x   the!?\n --"
    encoded = tokenizer.encode(text)
    assert encoded.tokens == [
        "<|begin|>", "I", "'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "(x", "ĠĠ", "Ġ", "the", "!?Ċ",
        "Ġ--",
    ]  # fmt: skip
    assert tokenizer.decode(encoded.ids) == text


@pytest.mark.parametrize("name", ["dbrx", "smaug-bpe"])
def test_words_of_gpt_4_are_those_of_llama_3_and_are_merged(
    write_gguf: WriteGguf, tmp_path: Path, name: str
) -> None:
    tokenizer = tokenizer_of(write_gguf, tmp_path / "hf", llama_3(pre=name))
    assert tokenizer.pre_tokenizer is not None
    text = "I'LL pay 12345\n\n(x   the!?\n --"
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert words == [
        "I", "'LL", "Ġpay", "Ġ", "123", "45", "ĊĊ", "(x", "ĠĠ", "Ġthe", "!?Ċ", "Ġ--",
    ]  # fmt: skip
    # No merge leads to the token " pay", and no beginning is added.
    assert tokenizer.encode("the pay").tokens == ["the", "Ġ", "p", "a", "y"]


def test_llama_3_spells_what_it_does_not_know_in_bytes(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(write_gguf, tmp_path / "hf", llama_3(add_bos_token=False))
    encoded = tokenizer.encode("é🙂")
    assert encoded.tokens == ["Ã", "©", "ð", "Ł", "Ļ", "Ĥ"]
    assert tokenizer.decode(encoded.ids) == "é🙂"


def test_sentencepiece_joins_the_best_pieces(write_gguf: WriteGguf, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_gguf, tmp_path / "hf", sentencepiece())
    assert tokenizer.encode("the ab 12").tokens == [
        "<s>", "▁the", "▁ab", "▁1", "2",
    ]  # fmt: skip
    rng = random.Random(5)
    for _ in range(500):
        text = "".join(rng.choices("theab 12é🙂ñ\n", k=rng.randrange(1, 24)))
        encoded = tokenizer.encode(text, add_special_tokens=False)
        assert encoded.tokens == best_score_first(f" {text}"), text
        assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_without_space_prefix_or_bos(write_gguf: WriteGguf, tmp_path: Path) -> None:
    metadata = sentencepiece(add_space_prefix=False, add_bos_token=False)
    tokenizer = tokenizer_of(write_gguf, tmp_path / "hf", metadata)
    assert tokenizer.encode("the  a").tokens == ["t", "he", "▁", "▁a"]
    encoded = tokenizer.encode(" the")
    assert encoded.tokens == ["▁the"]
    assert tokenizer.decode(encoded.ids) == " the"
    config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is False
    assert (config["bos_token"], config["unk_token"]) == ("<s>", "<unk>")


def test_sentencepiece_keeps_marked_tokens_whole(write_gguf: WriteGguf, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_gguf, tmp_path / "hf", sentencepiece())
    encoded = tokenizer.encode("a</s><|user|>a<unk>")
    assert encoded.tokens == ["<s>", "▁a", "</s>", "<|user|>", "▁a", "<unk>"]
    assert tokenizer.decode(encoded.ids) == "a<|user|> a"
    # The name of a byte token is text like any other.
    assert tokenizer.encode("<0x61>").tokens == ["<s>", "▁", "<0x6", "1>"]


def test_equal_scores_take_the_longer_left_part_first() -> None:
    pieces = {piece: i for i, piece in enumerate(["a", "b", "c", "ab", "bc", "abc", "ca"])}
    scores = [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -2.0]
    assert merges_of_scores(pieces, scores) == [
        ("b", "c"), ("a", "b"), ("c", "a"), ("ab", "c"), ("a", "bc"),
    ]  # fmt: skip


NO_BYTE = ["<0xZZ>" if token == "<0x0A>" else token for token in sentencepiece()[
    "tokenizer.ggml.tokens"
]]  # fmt: skip
NOT_A_BYTE = [1 if kind == 6 else kind for kind in sentencepiece()["tokenizer.ggml.token_type"]]
NAN = [float("nan"), *sentencepiece()["tokenizer.ggml.scores"][1:]]


@pytest.mark.parametrize(
    ("metadata", "wanted"),
    [
        (llama_3(bos_token_id=None), "there is no bos_token_id"),
        (sentencepiece(bos_token_id=None), "there is no bos_token_id"),
        (sentencepiece(scores=None), "tokenizer.ggml.scores is missing"),
        (sentencepiece(scores=[0.0]), "1 scores for 290 tokens"),
        (sentencepiece(scores=NAN), "wanted a list of finite numbers"),
        (sentencepiece(token_type=[1]), "1 token types for 290 tokens"),
        (sentencepiece(tokens=NO_BYTE), "no byte token <0x0A>"),
        (sentencepiece(token_type=NOT_A_BYTE), "no byte token <0x00>"),
        (sentencepiece(remove_extra_whitespaces=True), "remove_extra_whitespaces is set"),
        (sentencepiece(precompiled_charsmap=[1, 2]), "precompiled_charsmap is given"),
    ],
)
def test_what_is_not_supported_is_named(
    write_gguf: WriteGguf, tmp_path: Path, metadata: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(CheckpointError, match=wanted):
        tokenizer_of(write_gguf, tmp_path / "hf", metadata)
