"""Values of fields that the schema alone cannot check: bounds, and fields that go together.

An error names the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common.errors import InvalidRequest
from common.prompt_logprobs import check_num_entries
from common.request import MAX_LOGPROBS
from common.token_rules import MAX_BAD_WORDS
from router.api.bodies.schemas import SamplingFields
from router.http.errors import ModelNotFound
from router.text.stop_strings import MAX_STOP_CHARS, MAX_STOP_STRINGS
from router.text.text_model import TextModel
from router.text.usage import UsageEvents

MAX_WORDS = MAX_BAD_WORDS // 2
MAX_WORD_CHARS = 128
MAX_CHOICES = 128
"""Most choices of one request, over all its prompts."""
MAX_ANSWER_LOGPROBS = 200_000
"""Log probabilities of all choices of one request, those of the likeliest tokens included: at most
18 MB of JSON, and 30 MB of objects until it is made. As many make a chat of 9,523 tokens with 20
likeliest ones each, or 128 choices of 1,562 tokens."""
MAX_REPEATED_TOKENS = 2_000_000
"""Tokens of prompts that the choices of one answer repeat, as text or as ids: 10 MB."""
_MAX_ID_DIGITS = 10


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """The most tokens of an answer: what the field `param` says, or `default`; None: what fits."""

    asked: int | None
    param: str
    default: int | None = None


def num_choices(body: SamplingFields, best_of: int | None, num_prompts: int) -> tuple[int, int]:
    """Return how many choices of each prompt are returned, and how many run.

    Raises `InvalidRequest` for numbers out of range, and for the best of several in a stream.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n * num_prompts <= MAX_CHOICES or n < 1:
        raise InvalidRequest(
            f"n is {n} for {num_prompts} prompt(s): wanted 1 to {MAX_CHOICES} choices in all",
            param="n",
        )
    if best_of is None:
        return n, n
    if not n <= best_of <= MAX_CHOICES // num_prompts:
        raise InvalidRequest(
            f"best_of is {best_of} with n {n} and {num_prompts} prompt(s): wanted n or more, and "
            f"at most {MAX_CHOICES} choices in all",
            param="best_of",
        )
    if best_of > n and body.stream:
        raise InvalidRequest("best_of above n cannot be streamed", param="best_of")
    return n, best_of


def checked_logprobs(value: int, param: str) -> int:
    """Return a number of alternatives per token. Raises `InvalidRequest` out of its bounds."""
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{param} is {value}: wanted 0 to {MAX_LOGPROBS}", param=param)
    return value


def cause_of_logprobs(num_top: int | None, num_run: int, *, is_chat: bool) -> str:
    """Return the field, with its value, for which tokens have log probabilities, if they do.

    `num_top` is None where a request asks for none: only the best of several is then found by them.
    """
    if num_top is None:
        return f"best_of {num_run}"
    return f"{'top_logprobs' if is_chat else 'logprobs'} {num_top}"


def within_logprobs(
    max_tokens: MaxTokens, num_choices: int, num_top: int | None, cause: str
) -> MaxTokens:
    """Return `max_tokens`, of which so many choices have no more log probabilities than they may.

    Each token has `num_top` + 1 of them, because of the field `cause`; None: it has none. Without a
    number of its own a request gets the tokens that may have them. Raises `InvalidRequest` for one
    that makes too many.
    """
    if num_top is None:
        return max_tokens
    most = MAX_ANSWER_LOGPROBS // (num_choices * (1 + num_top))
    asked, param, default = max_tokens.asked, max_tokens.param, max_tokens.default
    if asked is None:
        return replace(max_tokens, default=most if default is None else min(default, most))
    if asked > most:
        raise InvalidRequest(
            f"{param} is {asked}, which with {cause} makes {asked * num_choices * (1 + num_top)} "
            f"log probabilities of {num_choices} choice(s): wanted at most {MAX_ANSWER_LOGPROBS}, "
            f"so {param} of at most {most}",
            param=param,
        )
    return max_tokens


def scored_prompts(
    body: SamplingFields, num_echoed: int | None, prompt_lengths: Iterable[int], num_choices: int
) -> int | None:
    """Return how many alternatives are found for each token of a prompt; None: nothing is.

    `num_echoed` is that of a prompt that is echoed with its log probabilities. Each prompt has
    `num_choices` for which it is computed. Raises `InvalidRequest` for a number out of bounds, too
    many log probabilities in all, and for `prompt_logprobs` of a stream.
    """
    asked, num_top = body.prompt_logprobs, num_echoed
    if asked is not None:
        if body.stream:
            raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        num_top = max(checked_logprobs(asked, "prompt_logprobs"), num_echoed or 0)
    if num_top is not None:
        param = "prompt_logprobs" if asked == num_top else "logprobs"
        check_num_entries(num_choices * sum(prompt_lengths), num_top, param)
    return num_top


def check_repeated(
    body: SamplingFields, num_choices: int, prompt_lengths: Iterable[int], *, is_echo: bool
) -> None:
    """Raise `InvalidRequest` when the choices of each prompt repeat too many of its tokens."""
    if not is_echo and not body.return_token_ids:
        return
    count = num_choices * sum(prompt_lengths)
    if count > MAX_REPEATED_TOKENS:
        field = "echo" if is_echo else "return_token_ids"
        raise InvalidRequest(
            f"{field} is true, with which {num_choices} choice(s) of each prompt repeat {count} "
            f"tokens of prompts: wanted at most {MAX_REPEATED_TOKENS}, so fewer choices or shorter "
            "prompts",
            param=field,
        )


def has_output(
    max_tokens: MaxTokens,
    body: SamplingFields,
    *,
    can_be_0: bool,
    with_fields: Sequence[str],
) -> bool:
    """Return whether tokens are asked for; with `can_be_0` a prompt alone can be.

    `with_fields` are the fields of the API with which it can be.

    Raises `InvalidRequest` where no tokens are asked for and nothing of the prompt, or yet some.
    """
    param = max_tokens.param
    if max_tokens.asked != 0:
        return True
    if not can_be_0:
        or_0 = f", or 0 with {' or '.join(with_fields)}" if with_fields else ""
        raise InvalidRequest(f"{param} is 0: wanted at least 1{or_0}", param=param)
    if body.min_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}: wanted 0 where {param} is 0", param="min_tokens"
        )
    return False


def most_prompt_tokens(body: SamplingFields) -> int | None:
    """Return how many tokens of a prompt are kept, its last ones; None: all of them.

    Raises `InvalidRequest` for less than one.
    """
    most = body.truncate_prompt_tokens
    if most is not None and most < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {most}: wanted at least 1", param="truncate_prompt_tokens"
        )
    return most


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings. Raises `InvalidRequest` for too many, an empty or a long one."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"stop has {len(stops)} strings: wanted at most {MAX_STOP_STRINGS}", param="stop"
        )
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(
            f"stop holds an empty or too long string: wanted 1 to {MAX_STOP_CHARS} characters",
            param="stop",
        )
    return stops


def usage_events(body: SamplingFields) -> UsageEvents:
    """Return which events have the usage. Raises `InvalidRequest` for options without a stream."""
    if body.stream_options is None:
        return UsageEvents.NONE
    if not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if not body.stream_options.include_usage:
        return UsageEvents.NONE
    is_each = body.stream_options.continuous_usage_stats
    return UsageEvents.EACH if is_each else UsageEvents.LAST


def logit_biases(body: SamplingFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return what is added to the logits of single tokens, in order of their ids.

    Raises `InvalidRequest` for what is no token id.
    """
    biases = {}
    for name, bias in (body.logit_bias or {}).items():
        is_number = len(name) <= _MAX_ID_DIGITS and name.isascii() and name.isdecimal()
        if not is_number or int(name) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {name[:20]!r}: wanted a token id, 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        biases[int(name)] = bias
    return tuple(sorted(biases.items()))


def bad_words(body: SamplingFields, model: TextModel) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of tokens that spell words which must not be written.

    A word is spelt in two ways, as in vLLM: as it is, and as its tokens behind a space are. Raises
    `InvalidRequest` for too many words, an empty or a long one.
    """
    words = body.bad_words or []
    if len(words) > MAX_WORDS:
        raise InvalidRequest(
            f"bad_words has {len(words)} words: wanted at most {MAX_WORDS}", param="bad_words"
        )
    spelt: dict[tuple[int, ...], None] = {}
    for word in words:
        text = word.lstrip()
        if not 1 <= len(text) <= MAX_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words has an empty or too long word: wanted 1 to {MAX_WORD_CHARS} characters",
                param="bad_words",
            )
        alone, behind_space = model.spelt(text), model.spelt(f" {text}")
        spelt[alone] = None
        if len(behind_space) == len(alone) and behind_space[0] != alone[0]:
            spelt[behind_space] = None
    return tuple(spelt)


def check_model(asked: str | None, model: TextModel) -> None:
    """Raise `ModelNotFound` for a request that names another model; it may name none."""
    if asked is not None and not model.is_called(asked):
        raise ModelNotFound(asked, model.name)
