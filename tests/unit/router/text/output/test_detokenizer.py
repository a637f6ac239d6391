"""Pieces of text from tokens: they add up to the whole, and come as soon as they are certain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from common.files.kept_files import KeptFiles
from router.text.model_files import read_tokenizer
from router.text.output.detokenizer import MAX_PENDING, Detokenizer
from router.text.token_lookup import TokenBytes, TokenTextCache
from tests.support.examples import everyday
from tests.support.http.edge_model import CONTEXT, tiny_model, write_model_folder

MODEL = tiny_model()
ID_OF_BYTES = {MODEL.describe_token(i).raw: i for i in range(MODEL.vocab_size)}
ALL_IDS = st.lists(st.integers(0, MODEL.vocab_size - 1), max_size=3 * MAX_PENDING)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """The tokenizer of `MODEL`."""
    return read_tokenizer(write_model_folder(tmp_path), MODEL.vocab_size, KeptFiles())


def pieces(token_ids: list[int]) -> list[str]:
    detokenizer = MODEL.new_detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def encode(text: str) -> list[int]:
    return list(MODEL.encode(text, add_special_tokens=False, param="text"))


def byte_ids(data: bytes) -> list[int]:
    """The one-byte tokens of `data`, which need not be text."""
    return [ID_OF_BYTES[bytes([byte])] for byte in data]


@pytest.mark.covers("T09")
@settings(max_examples=everyday(100, of=400), deadline=None, derandomize=True)
@given(ALL_IDS)
def test_pieces_add_up_to_the_whole(token_ids: list[int]) -> None:
    assert "".join(pieces(token_ids)) == MODEL.decode(token_ids)


@settings(max_examples=everyday(100, of=400), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0x61, 0x80, 0xBF, 0xC2, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF])))
def test_bytes_that_are_not_text_add_up_too(data: list[int]) -> None:
    token_ids = byte_ids(bytes(data))
    assert "".join(pieces(token_ids)) == MODEL.decode(token_ids)


@pytest.mark.parametrize("num_bad", range(2 * MAX_PENDING))
def test_a_character_after_garbage_stays_whole(num_bad: int) -> None:
    token_ids = byte_ids(b"\xff" * num_bad + "🙂!".encode())
    assert "".join(pieces(token_ids)) == "\ufffd" * num_bad + "🙂!"


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_text_comes_back(text: str) -> None:
    assert "".join(pieces(encode(text))) == text


def test_an_emoji_comes_when_its_last_byte_does() -> None:
    token_ids = encode("a🙂b")
    assert len(token_ids) > 3
    assert [piece for piece in pieces(token_ids) if piece] == ["a", "🙂", "b"]
    assert "�" not in "".join(pieces(token_ids))


@pytest.mark.covers("T28")
def test_unfinished_bytes_are_shown_at_the_end() -> None:
    assert pieces(byte_ids(b"a\xf0\x9f")) == ["a", "", "", "�"]


def test_special_tokens_have_no_text_even_inside_a_character() -> None:
    first, second = byte_ids("é".encode())
    assert pieces([first, 0, second, 1]) == ["", "", "é", "", ""]


@pytest.mark.covers("T10")
def test_garbage_is_let_go_and_costs_the_same_for_ever() -> None:
    longest = 0

    def decode(token_ids: object) -> str:
        nonlocal longest
        assert isinstance(token_ids, list)
        longest = max(longest, len(token_ids))
        return MODEL.decode(token_ids)

    detokenizer = Detokenizer(decode, frozenset())
    token_ids = byte_ids(b"\xff") * 500
    text = "".join(detokenizer.push(token_id) for token_id in token_ids)
    assert len(text) > 500 - MAX_PENDING
    assert longest <= 2 * MAX_PENDING


def sentencepiece() -> Tokenizer:
    """The decoder of Llama 2 and ERNIE: word marks, byte tokens, and a first space dropped."""
    words = ["▁", "▁Hello", "▁world", "lo", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


WORDS = ("a", "日", "▁b", "�")
"""Tokens of a vocabulary that has one for each byte before them."""


@pytest.fixture(scope="module")
def with_bytes() -> Callable[[], Detokenizer]:
    """Begin an answer in a tokenizer with word marks and a token for each byte."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: place for place, word in enumerate(WORDS, 256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = sentencepiece().decoder
    bytes_of = TokenBytes(tokenizer).single_bytes()
    assert bytes_of == {byte: byte for byte in range(256)}

    def decode(token_ids: Sequence[int]) -> str:
        assert len(token_ids) <= 2 * MAX_PENDING, "the window of the module's docstring"
        return tokenizer.decode(token_ids)

    return lambda: Detokenizer(decode, frozenset(), bytes_of=bytes_of)


def read(token_ids: list[int]) -> str:
    """What those tokens say: bytes in a row are UTF-8, and what fits nowhere is U+FFFD."""
    text = ""
    for is_word, row in groupby(token_ids, lambda one: one >= 256):
        if is_word:
            text += "".join(WORDS[one - 256].replace("▁", " ") for one in row)
        else:
            text += bytes(row).decode(errors="replace")
    return text


@pytest.mark.covers("T36")
@pytest.mark.parametrize(
    ("token_ids", "shown"),
    [
        ([*"日".encode(), 0xE6], ["", "", "日", "", "�"]),
        ([*"日".encode(), 0xC3, 256], ["", "", "日", "", "�a", ""]),
        ([*"日".encode(), 0xFF, *"本".encode()], ["", "", "日", "�", "", "", "本", ""]),
        ([*"🙂".encode(), 0xF0, 0x9F], ["", "", "", "🙂", "", "", "�"]),
        ([0xE6, 0xE6, 0x97, 0xA5, 258], ["", "�", "", "日", " b", ""]),
        ([259, *"é".encode()], ["", "�", "é", ""]),
        ([258, 0xC3, 258], ["b", "", "� b", ""]),
    ],
)
def test_a_byte_that_fits_nowhere_spoils_no_character(
    token_ids: list[int], shown: list[str], with_bytes: Callable[[], Detokenizer]
) -> None:
    detokenizer = with_bytes()
    assert [*map(detokenizer.push, token_ids), detokenizer.flush()] == shown


@pytest.mark.covers("T36")
@settings(max_examples=everyday(200, of=800), deadline=None, derandomize=True)
@example(token_ids=[0xE2, 0x80, 0x61, 259, 259, 256])
@given(
    st.lists(
        st.sampled_from([0x61, 0x80, 0xBF, 0xC2, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF])
        | st.integers(256, 259),
        max_size=40,
    )
)
def test_bytes_and_words_in_any_order_are_what_they_say(
    with_bytes: Callable[[], Detokenizer], token_ids: list[int]
) -> None:
    detokenizer, shown = with_bytes(), ""
    for token_id in token_ids:
        shown += detokenizer.push(token_id)
    # A first space is dropped, as the tokenizer does it.
    whole = read(token_ids)
    dropped = whole[1:] if token_ids and token_ids[0] == 258 else whole
    assert shown + detokenizer.flush() == dropped


@pytest.mark.covers("T09")
@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        ([1, 2, 3], "Hello worldlo"),
        ([0, 3, 0, 2], "lo  world"),
        ([1, 4, 5, 6, 7, 2], "Hello🙂 world"),
    ],
)
def test_word_marks_and_byte_tokens(token_ids: list[int], text: str) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.decode(token_ids) == text
    detokenizer = Detokenizer(tokenizer.decode, frozenset())
    assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == text


@pytest.mark.covers("T09")
def test_a_completion_keeps_the_space_after_its_prompt() -> None:
    detokenizer = Detokenizer(sentencepiece().decode, frozenset(), continues=[1])
    assert detokenizer.push(2) == " world"


@pytest.mark.covers("T08")
def test_a_prompt_that_ends_inside_a_character_is_no_context() -> None:
    first, second = byte_ids("é".encode())
    detokenizer = Detokenizer(MODEL.decode, frozenset(), continues=[first])
    assert detokenizer.push(second) + detokenizer.flush() == "�"


@pytest.mark.covers("T08", "T09")
@pytest.mark.parametrize("prompt", [[1, 4], [1, 4, 5, 6], [3, 1, 4, 4, 4]])
def test_the_space_behind_a_prompt_that_ends_inside_a_character_is_kept(prompt: list[int]) -> None:
    detokenizer = Detokenizer(sentencepiece().decode, frozenset(), continues=prompt)
    assert detokenizer.push(2) == " world"
    assert detokenizer.push(2) == " world"


def test_a_long_answer_is_exact() -> None:
    text = ("naïve 漢字 🙂‍↔️ x" * CONTEXT)[: 8 * CONTEXT]
    assert "".join(pieces(encode(text))) == text


def test_whole_tokens_are_looked_up_and_the_others_decoded(tokenizer: Tokenizer) -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += bool(token_ids)
        return MODEL.decode(token_ids)

    texts = TokenTextCache(tokenizer)
    detokenizer = Detokenizer(decode, frozenset(), whole_text=texts.__getitem__)
    words = encode("Hello world")
    assert "".join(map(detokenizer.push, words)) == "Hello world"
    assert num_decoded == 0
    assert "".join(map(detokenizer.push, [*byte_ids("🙂".encode()), *words])) == "🙂Hello world"
    assert num_decoded > 0


def test_a_token_that_only_neighbours_complete_is_never_looked_up(tokenizer: Tokenizer) -> None:
    texts = TokenTextCache(tokenizer)
    assert texts[ID_OF_BYTES[b"a"]] == "a"
    assert [texts[token_id] for token_id in byte_ids("é".encode())] == [None, None]
    assert texts[10**9] is None
    assert 10**9 not in texts, "what no vocabulary bounds is not kept"


def test_where_a_decoder_drops_spaces_nothing_is_looked_up() -> None:
    texts = TokenTextCache(sentencepiece())
    assert [texts[token_id] for token_id in range(8)] == [None] * 8


@pytest.mark.covers("K07")
@pytest.mark.parametrize(
    ("token_ids", "text"), [([0, 3], " lo"), ([1, 2], " Hello world"), ([3, 2], "lo world")]
)
def test_the_first_space_of_what_a_constraint_describes_is_kept(
    token_ids: list[int], text: str
) -> None:
    tokenizer = sentencepiece()
    for behind, shown in (((3,), text), ((), text.lstrip())):
        detokenizer = Detokenizer(tokenizer.decode, frozenset(), behind=behind)
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        assert "".join([*pieces, detokenizer.flush()]) == shown


def test_a_prompt_that_is_continued_is_the_context() -> None:
    tokenizer = sentencepiece()
    detokenizer = Detokenizer(tokenizer.decode, frozenset(), [1], behind=(3,))
    assert detokenizer.push(2) == " world"
