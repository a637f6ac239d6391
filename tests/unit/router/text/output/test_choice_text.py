"""Tokens to deltas: stop strings over token borders, logprobs with their text, counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InternalError
from common.request import FinishReason, RequestCounts
from router.core.generation import TokenChunk
from router.text.output.choice_text import ChoiceText, Delta, LogprobEntry
from router.tools.answer_parser import AnswerSyntax
from router.tools.formats import HERMES
from router.tools.stop_scope import stop_scope
from router.tools.thinking import ThinkingFormat
from tests.support.http.edge_model import BOS, EOS, tiny_model
from tests.support.http.scripted_generator import chunks

MODEL = tiny_model()
EOS_ID = next(iter(MODEL.eos_token_ids))


def encode(text: str) -> list[int]:
    return list(MODEL.encode(text, add_special_tokens=False, param="text"))


def choice(*stop: str, **options: object) -> ChoiceText:
    return ChoiceText(MODEL.new_detokenizer(), stop, **options)  # type: ignore[arg-type]


def run(text: ChoiceText, parts: list[TokenChunk]) -> list[Delta]:
    """Push until the choice is over, as the edge does."""
    deltas = []
    for part in parts:
        deltas += text.push_all([part])
        if deltas[-1].details.finish_reason is not None:
            break
    return deltas


def shown(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(st.text(min_size=1, max_size=40), st.integers(1, 4), st.sampled_from(["", "echo "]))
def test_text_that_is_shown_as_it_comes_takes_a_short_way_to_the_same(
    plain: str, size: int, echo: str
) -> None:
    parts = chunks(encode(plain), FinishReason.LENGTH, size=size)
    one_by_one = choice(echo=echo)
    assert choice(echo=echo).push_all(parts) == [one_by_one.push(part) for part in parts]


def test_plain() -> None:
    deltas = run(choice(), chunks(encode("Hello world"), FinishReason.LENGTH))
    assert [delta.text for delta in deltas] == ["Hello", " world"]
    assert [delta.num_tokens for delta in deltas] == [1, 1]
    assert [delta.details.finish_reason for delta in deltas] == [None, FinishReason.LENGTH]


@pytest.mark.covers("T28")
@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_an_answer_that_ends_inside_a_character_shows_that_it_does(
    size: int, stop: tuple[str, ...]
) -> None:
    token_ids = encode("a\U0001f600")[:-1]
    assert len(token_ids) > 1
    deltas = run(choice(*stop), chunks(token_ids, FinishReason.LENGTH, size=size))
    assert shown(deltas) == "a\ufffd"


@pytest.mark.covers("T28")
@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_a_character_that_the_end_token_cuts_off_is_shown_so(
    size: int, stop: tuple[str, ...]
) -> None:
    token_ids = [*encode("a\U0001f600")[:-1], EOS_ID]
    deltas = run(choice(*stop), chunks(token_ids, FinishReason.STOP, size=size))
    assert shown(deltas) == "a\ufffd"
    assert deltas[-1].details.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_ends_the_choice_and_the_count(size: int) -> None:
    token_ids = encode("Hello world. Over")
    deltas = run(choice("ld."), chunks(token_ids, size=size))
    assert shown(deltas) == "Hello wor"
    assert deltas[-1].details.finish_reason is FinishReason.STOP
    used = len(encode("Hello world."))
    assert sum(delta.num_tokens for delta in deltas) == used < len(token_ids)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_stop_string_counts_only_behind_the_least_length(size: int, has_logprobs: bool) -> None:
    """One that ends in the first tokens is shown; one that ends in a later token is cut whole."""
    token_ids = encode("Hello world. Hello world. Over")
    first, second = len(encode("Hello world.")), len(encode("Hello world. Hello world."))
    for min_tokens in range(second + 1):
        parts = chunks(token_ids, FinishReason.LENGTH, size=size, num_logprobs=0)
        deltas = run(choice("ld.", min_tokens=min_tokens, has_logprobs=has_logprobs), parts)
        wanted, used = (
            ("Hello wor", first) if min_tokens < first else ("Hello world. Hello wor", second)
        )
        if min_tokens == second:
            wanted, used = "Hello world. Hello world. Over", len(token_ids)
        assert (shown(deltas), sum(delta.num_tokens for delta in deltas)) == (wanted, used)
        is_cut = min_tokens < second
        reason = FinishReason.STOP if is_cut else FinishReason.LENGTH
        assert deltas[-1].details.finish_reason is reason


def test_text_that_comes_with_the_end_stops_only_behind_the_least_length() -> None:
    """The half character at the end is shown by the last chunk, with no token of its own."""
    token_ids = encode("a\U0001f600")[:-1]
    for min_tokens in (len(token_ids) - 1, len(token_ids)):
        deltas = run(
            choice("\ufffd", min_tokens=min_tokens), chunks(token_ids, FinishReason.LENGTH)
        )
        is_late = min_tokens == len(token_ids)
        assert shown(deltas) == ("a\ufffd" if is_late else "a")


@pytest.mark.covers("T03")
def test_accepted_drafts_that_a_stop_string_cuts_off_are_not_in_the_answer() -> None:
    token_ids = encode("Hello world. Over the")
    used = len(encode("Hello world."))
    counts = RequestCounts(0, 9, len(token_ids) - 1)
    chunk = TokenChunk(first_index=0, token_ids=tuple(token_ids), counts=counts)
    delta = choice("ld.").push(chunk)
    assert delta.num_tokens == used < len(token_ids) - 1
    wanted = RequestCounts(0, 9, used)
    assert delta.details.counts == wanted, "of what was cut, the last token was the model's own"
    whole = choice().push(chunk)
    assert whole.details.counts == counts


def test_what_was_held_comes_at_the_end() -> None:
    deltas = run(choice("worlds"), chunks(encode("Hello world"), FinishReason.LENGTH))
    assert shown(deltas) == "Hello world"
    assert deltas[-1].details.finish_reason is FinishReason.LENGTH


def test_a_stop_string_in_the_very_last_token_counts_as_stop() -> None:
    deltas = run(choice(" world"), chunks(encode("Hello world"), FinishReason.LENGTH))
    assert (shown(deltas), deltas[-1].details.finish_reason) == ("Hello", FinishReason.STOP)


def test_the_token_that_stopped_it_is_counted_but_not_shown() -> None:
    token_ids = encode("Hello!")
    hidden = frozenset({token_ids[-1]})
    text = choice(hidden_token_ids=hidden)
    deltas = run(text, chunks(token_ids, FinishReason.STOP))
    assert (shown(deltas), sum(d.num_tokens for d in deltas)) == ("Hello", len(token_ids))
    # The same token inside the answer, or at a length limit, is text like any other.
    text = choice(hidden_token_ids=hidden)
    assert shown(run(text, chunks(token_ids, FinishReason.LENGTH))) == "Hello!"


def test_a_last_chunk_without_tokens() -> None:
    text = choice("o w")
    parts = [TokenChunk(first_index=0, token_ids=tuple(encode("Hello")))]
    parts.append(TokenChunk(first_index=1, token_ids=(), finish_reason=FinishReason.STOP))
    deltas = run(text, parts)
    assert [delta.text for delta in deltas] == ["Hell", "o"]


def test_the_echo_comes_first_and_is_no_stop() -> None:
    deltas = run(choice("Hello", echo="Hello: "), chunks(encode("lazy"), FinishReason.LENGTH))
    assert deltas[0].text.startswith("Hello: ")
    assert shown(deltas) == "Hello: lazy"


def test_logprobs_come_with_their_text() -> None:
    token_ids = encode("Hello world")
    deltas = run(
        choice("d!", has_logprobs=True),
        chunks(token_ids, FinishReason.LENGTH, num_logprobs=0),
    )
    offsets = [(e.token_id, e.text_offset) for delta in deltas for e in delta.entries]
    assert offsets == [(token_ids[0], 0), (token_ids[1], 5)]


@pytest.mark.covers("T05")
def test_logprobs_of_a_cut_token_are_cut_too() -> None:
    token_ids = encode("Hello world")
    deltas = run(
        choice(" world", has_logprobs=True),
        chunks(token_ids, FinishReason.LENGTH, num_logprobs=0),
    )
    assert [e.token_id for delta in deltas for e in delta.entries] == token_ids[:1]


@pytest.mark.covers("T05")
@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="ab🙂é lo", max_size=12), st.integers(1, 4), st.sampled_from(["lo", "🙂b"]))
def test_entries_and_text_agree(text: str, size: int, stop: str) -> None:
    """Every entry is out exactly when its token's first character is, in order, once."""
    token_ids = encode(text)
    if not token_ids:
        return
    deltas = run(
        choice(stop, has_logprobs=True),
        chunks(token_ids, FinishReason.LENGTH, num_logprobs=0, size=size),
    )
    sent = 0
    entries: list[LogprobEntry] = []
    for delta in deltas:
        sent += len(delta.text)
        entries += delta.entries
        assert all(entry.text_offset <= sent for entry in delta.entries)
    assert [e.token_id for e in entries] == token_ids[: len(entries)]
    if deltas[-1].details.finish_reason is FinishReason.LENGTH:
        assert len(entries) == len(token_ids)
    else:
        assert all(entry.text_offset < sent for entry in entries)


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize(
    ("stop", "num_entries"), [(" w", 3), ("rl", 4), ("zz", 6), ("HeX", 6), ("Hello w", 1)]
)
def test_a_textless_token_goes_with_the_text_before_it(
    stop: str, num_entries: int, size: int
) -> None:
    """Whichever come together: one before the stop string is told, one behind it is not."""
    hello, world = encode("Hello"), encode(" world")
    token_ids = [EOS_ID, *hello, EOS_ID, *world, EOS_ID, EOS_ID]
    assert len(token_ids) == 6
    parts = chunks(token_ids, FinishReason.LENGTH, num_logprobs=0, size=size)
    entries = [e for one in run(choice(stop, has_logprobs=True), parts) for e in one.entries]
    assert [e.token_id for e in entries] == token_ids[:num_entries]


def test_textless_tokens_do_not_pile_up_their_logprobs() -> None:
    text = choice("x", has_logprobs=True)
    for part in chunks([EOS_ID] * 50, num_logprobs=0)[:-1]:
        assert len(text.push(part).entries) == 1


def test_missing_logprobs_are_a_bug_not_an_empty_list() -> None:
    text = choice(has_logprobs=True)
    with pytest.raises(InternalError, match="0 logprobs"):
        text.push(chunks(encode("Hello"))[0])


BOS_ID = MODEL.special_tokens_in([BOS])[BOS]
TURNS = [*encode("Hello"), BOS_ID, *encode("user"), BOS_ID, *encode(" world")]
"""Text between special tokens that have no text."""
assert len(TURNS) == 5


def turns(stop: str, parts: list[TokenChunk], **options: object) -> list[Delta]:
    return run(choice(stop, named_tokens=MODEL.special_tokens_in([stop]), **options), parts)


@pytest.mark.covers("T24")
@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize(
    ("stop", "before", "num_tokens", "num_entries"),
    [
        (BOS, "Hello", 2, 1),
        (f"{BOS}user", "Hello", 3, 1),
        (f"user{BOS}", "Hello", 4, 2),
        (f"lo{BOS}us", "Hel", 3, 1),
        (f"{BOS} w", "Hellouser", 5, 3),
        (f"{BOS}{BOS}", "Hellouser world", 5, 5),
        (EOS, "Hellouser world", 5, 5),
    ],
)
def test_a_stop_string_may_name_a_special_token(
    stop: str, before: str, num_tokens: int, num_entries: int, size: int, has_logprobs: bool
) -> None:
    parts = chunks(TURNS, FinishReason.LENGTH, size=size, num_logprobs=0)
    deltas = turns(stop, parts, has_logprobs=has_logprobs)
    assert shown(deltas) == before
    assert sum(delta.num_tokens for delta in deltas) == num_tokens
    is_found = before != "Hellouser world"
    assert deltas[-1].details.stop_reason == (stop if is_found else None)
    if has_logprobs:
        entries = [entry for delta in deltas for entry in delta.entries]
        assert [entry.token_id for entry in entries] == TURNS[:num_entries]
        offsets = [0, 5, 5, 9, 9][:num_entries]
        assert [entry.text_offset for entry in entries] == offsets


@pytest.mark.covers("T24")
@pytest.mark.parametrize("size", [1, 100])
def test_one_that_is_spelled_counts_too_and_both_may_be_shown(size: int) -> None:
    spelled = [*encode("Hello"), *encode(BOS[:4]), *encode(BOS[4:]), BOS_ID]
    for token_ids in (spelled, TURNS):
        parts = chunks(token_ids, FinishReason.LENGTH, size=size)
        assert shown(turns(BOS, parts)) == "Hello"
        assert shown(turns(BOS, parts, shows_stop=True)) == "Hello" + BOS


@pytest.mark.covers("T24")
@pytest.mark.parametrize("size", [1, 2, 100])
def test_one_counts_only_behind_the_least_length(size: int) -> None:
    parts = chunks(TURNS, FinishReason.LENGTH, size=size)
    wanted = ["Hello", "Hello", "Hellouser", "Hellouser", "Hellouser world"]
    assert [shown(turns(BOS, parts, min_tokens=least)) for least in range(5)] == wanted


CALLS = AnswerSyntax(call_format="hermes")
CALL = HERMES.call_text("now", "{}")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_stop_string_inside_a_call_is_part_of_the_call(size: int, has_logprobs: bool) -> None:
    said = "I look" + CALL
    num_logprobs = 1 if has_logprobs else None
    played = chunks(encode(said), FinishReason.STOP, size=size, num_logprobs=num_logprobs)
    stop = ("\n", "call>", "look<", "<tool_calls")
    deltas = run(choice(*stop, scope=stop_scope(CALLS), has_logprobs=has_logprobs), played)
    assert shown(deltas) == said
    last = deltas[-1].details
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)
    if has_logprobs:
        assert sum(len(delta.entries) for delta in deltas) == len(encode(said))


class OneToken:
    """A decoder whose one token has the text of the answer."""

    has_pending = False

    def __init__(self, text: str) -> None:
        self._text = text

    def push(self, token_id: int) -> str:
        return self._text

    def flush(self) -> str:
        return ""


def test_a_stop_string_and_a_call_may_come_in_one_token() -> None:
    text = ChoiceText(OneToken("I look.\n" + CALL), ("\n",), scope=stop_scope(CALLS))
    (delta,) = run(text, chunks([7], FinishReason.STOP))
    assert (delta.text, delta.details.stop_reason) == ("I look.", "\n")


@pytest.mark.parametrize("size", [1, 1000])
def test_a_stop_string_before_a_call_ends_the_choice(size: int) -> None:
    played = chunks(encode("I look.\n" + CALL), FinishReason.STOP, size=size)
    deltas = run(choice("\n", scope=stop_scope(CALLS)), played)
    assert shown(deltas) == "I look."
    assert deltas[-1].details.stop_reason == "\n"


@pytest.mark.parametrize(("end", "before"), [("", "a "), ("b", "a ")])
def test_a_stop_string_that_may_begin_a_call_is_found_when_it_does_not(
    end: str, before: str
) -> None:
    played = chunks(encode("a <" + end), FinishReason.LENGTH)
    deltas = run(choice("<", scope=stop_scope(CALLS)), played)
    assert shown(deltas) == before
    assert deltas[-1].details.stop_reason == "<"


def test_held_text_of_the_least_length_does_not_stop() -> None:
    ids = encode("a <") + encode("b <") + encode("c")
    played = chunks(ids, FinishReason.LENGTH)
    least = len(encode("a <"))
    deltas = run(choice("<", scope=stop_scope(CALLS), min_tokens=least), played)
    assert shown(deltas) == "a <b "


THINKS = AnswerSyntax(thinking=ThinkingFormat.BEGUN)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thinking_and_the_white_space_behind_it_do_not_stop(size: int) -> None:
    stop = ("\n\n", "Question:", ">\n", "think")
    said = "So, Question: what?\n\nHm\n</think>\n\nFour.\nSo"
    played = chunks(encode(said + "\n\nMore"), FinishReason.LENGTH, size=size)
    deltas = run(choice(*stop, scope=stop_scope(THINKS)), played)
    assert shown(deltas) == said
    assert deltas[-1].details.stop_reason == "\n\n"


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_least_length_that_ends_in_the_thinking_leaves_the_answer_to_stop(num_more: int) -> None:
    thought, answer = encode("a b\n</think>\n\n"), encode("a b")
    least = len(thought) - 1 + 2 * num_more
    text = choice("a", scope=stop_scope(THINKS), min_tokens=least)
    deltas = run(text, chunks(thought + answer, FinishReason.LENGTH))
    assert (deltas[-1].details.stop_reason == "a") is (num_more == 0)


@pytest.mark.covers("T27")
@pytest.mark.parametrize("size", [1, 1000])
def test_every_token_of_thinking_keeps_its_logprobs(size: int) -> None:
    said = encode("a\nb\n</think>\n\nHi")
    played = chunks(said, FinishReason.LENGTH, size=size, num_logprobs=1)
    deltas = run(choice("\n", scope=stop_scope(THINKS), has_logprobs=True), played)
    assert [entry.token_id for delta in deltas for entry in delta.entries] == said
