"""The text side of the demo model: its chat template, and pieces of text that add up."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.checkpoints.demo_model import demo_model_folder
from router.text.text_model import TextModel


@cache
def model() -> TextModel:
    return TextModel.load(demo_model_folder(), "demo", 0)


@cache
def partial_ids() -> list[int]:
    """Tokens whose bytes are not whole characters."""
    every = range(model().vocab_size)
    return [i for i in every if model().describe_token(i).text.startswith("bytes:")]


def token_ids() -> st.SearchStrategy[list[int]]:
    any_id = st.integers(0, 49_151)
    return st.lists(any_id | st.deferred(lambda: st.sampled_from(partial_ids())), max_size=40)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(token_ids())
def test_pieces_add_up_to_the_whole(ids: list[int]) -> None:
    detokenizer = model().new_detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == model().decode(ids)


# The vocabulary has no token for some control characters and for the bytes 0xF1 and above.
KNOWN = st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(KNOWN, max_size=60))
def test_text_and_the_bytes_of_its_tokens_come_back(text: str) -> None:
    ids = model().encode(text, add_special_tokens=True, param="prompt")
    assert model().decode(ids) == text
    assert b"".join(model().describe_token(i).raw for i in ids) == text.encode()


def test_the_chat_template() -> None:
    text = model().render_chat([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = model().encode(text, add_special_tokens=False, param="messages")
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert model().eos_token_ids == {2}
