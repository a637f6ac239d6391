"""The two shapes of an answer: chat completions and (text) completions, streamed and whole.

A format is made once per request. It serialises then what all events of the request share, and per
event the text, its logprobs and the choice's index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.prompt_logprobs import PromptLogprobs
from common.request import FinishReason
from router.api.answers.json_parts import (
    chat_logprobs_json,
    completion_logprobs_json,
    ids_json,
    prompt_logprobs_json,
)
from router.http.errors import ApiError, error_event
from router.http.sse import DONE, PING, event, event_text, text_json, to_json
from router.text.output.choice_text import Delta, LogprobEntry
from router.text.output.logprobs_json import DescribeToken
from router.text.output.usage import Usage, UsageEvents
from router.tools.answer_parser import PLAIN, AnswerParser, AnswerSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that every event of one answer repeats. `created_s` is Unix time in seconds."""

    id: str
    created_s: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The prompts of the choices, with `num_top` likeliest tokens; None: nothing is asked for."""

    num_top: int | None = None
    prompts: Sequence[tuple[int, ...]] = ()


NOT_SCORED = ScoredPrompts()


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer that is sent whole.

    `echoed` are the entries of its prompt, where that is shown, and `entries` those of its tokens.
    """

    text: list[str] = field(default_factory=list)
    echoed: Sequence[LogprobEntry] = ()
    entries: list[LogprobEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    _sum_logprobs: float = 0.0

    def add(self, delta: Delta) -> None:
        """Add the next delta."""
        details = delta.details
        self.text.append(delta.text)
        self.echoed = self.echoed or details.echoed
        self._sum_logprobs += sum(e.logprobs.logprob for e in delta.entries if e.logprobs)
        self.entries.extend(delta.entries)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason, self.stop_reason = details.finish_reason, details.stop_reason
        if details.of_prompt is not None:
            self.prompt_logprobs = details.of_prompt.prompt_logprobs

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the tokens that are shown; that of none is the lowest.

        Those of the prompt do not count.
        """
        num = len(self.entries)
        return self._sum_logprobs / num if num else float("-inf")


class AnswerForm(Protocol):
    """The interface that gives answers the shape of an API; made once per request."""

    ping: bytes
    """The bytes that a stream sends when nothing else has come for a while."""

    def begin(self) -> bytes:
        """Return the events that need no token, for a stream whose first one is awaited."""

    def events(self, index: int, deltas: Sequence[Delta]) -> bytes:
        """Return the events for these deltas of choice `index`; empty when they show nothing."""

    def end_of_stream(self) -> bytes:
        """Return what follows the events of all choices."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""

    def whole(self, choices: Sequence[WholeChoice]) -> Iterator[str]:
        """Yield the JSON of the answer of a request that does not stream."""


class AnswerFormat(ABC):
    """Turns deltas into bytes of events, or whole choices into one JSON object."""

    ping = PING
    stream_object: str
    whole_object: str
    has_prompt_in_choices: bool
    """Whether the log probabilities of prompts are in each choice, or once beside the choices."""

    def __init__(
        self,
        head: AnswerHead,
        describe: DescribeToken,
        *,
        usage: Usage,
        has_logprobs: bool,
        usage_events: UsageEvents,
        prompts: Sequence[tuple[int, ...]] = (),
        scored: ScoredPrompts = NOT_SCORED,
        syntax: AnswerSyntax = PLAIN,
        hides_thinking: bool = False,
    ) -> None:
        """Set the format up; `usage` is that of the answer so far.

        With `prompts`, those of each choice, the answer also has the ids of all tokens. Of `scored`
        it has the log probabilities, where it is whole. `syntax` is what the text of a choice may
        hold; with `hides_thinking` what the model thinks is left out.
        """
        self._syntax = syntax
        self._hides_thinking = hides_thinking
        self._parsers: dict[int, AnswerParser] = {}
        self._head = head
        self._describe = describe
        self._usage = usage
        self._has_logprobs = has_logprobs
        self._usage_events = usage_events
        self._prompts = prompts
        self._scored = scored
        is_text_alone = not has_logprobs and not prompts
        self._has_same_frame = is_text_alone and usage_events is not UsageEvents.EACH
        self._stream_top = to_json(self._top(self.stream_object))[:-1]
        self._open = f'{self._stream_top},"choices":[{{"index":'
        self._frames: dict[int, tuple[str, str]] = {}
        """The JSON before and after the text of an event, of each choice that has begun.

        Empty where more than the text differs.
        """

    def begin(self) -> bytes:
        """Return nothing: the first event of a choice comes with its first token."""
        return b""

    def events(self, index: int, deltas: Sequence[Delta]) -> bytes:
        """Return the events for these deltas of choice `index`; empty when they show nothing."""
        frame = self._frames.get(index)
        events = [] if frame is not None else self._first_events(index)
        before, after = frame or self._frames[index]
        for delta in deltas:
            text = delta.text
            if before and text:
                events.append(f"{before}{text_json(text)}{after}")
            elif not before and self._is_shown(delta):
                events.append(self._event(index, self._delta_fields(delta), "null"))
            if delta.details.finish_reason is not None:
                reason = f'"{delta.details.finish_reason.value}"'
                last = f'{self._last_fields()},"stop_reason":{to_json(delta.details.stop_reason)}'
                events.append(self._event(index, last, reason))
        return "".join(events).encode()

    def end_of_stream(self) -> bytes:
        """Return what follows the events of the choices: the usage, if asked for, and `[DONE]`."""
        if self._usage_events is UsageEvents.NONE:
            return DONE
        usage = to_json(self._usage.as_json())
        return event(f'{self._stream_top},"choices":[],"usage":{usage}}}') + DONE

    def error_event(self, error: ApiError) -> bytes:
        """Return the event of an error, and `[DONE]`."""
        return error_event(error)

    def whole(self, choices: Sequence[WholeChoice]) -> Iterator[str]:
        """Yield the JSON of the answer of a request that does not stream, choice by choice."""
        top = to_json(self._top(self.whole_object))[:-1]
        yield f'{top}{self._top_tokens(0)},"choices":['
        for index, choice in enumerate(choices):
            comma = "," if index else ""
            yield comma + to_json(self._whole_choice(index, choice))[:-1]
            yield ',"logprobs":'
            yield from self._logprobs(choice.echoed, choice.entries)
            yield from self._whole_tokens(index, choice)
            if self.has_prompt_in_choices:
                yield from self._prompt_logprobs(index, choice)
            yield "}"
        yield "]"
        if not self.has_prompt_in_choices:
            yield from self._prompt_logprobs(0, choices[0])
        yield f',"usage":{to_json(self._usage.as_json())}}}'

    def _whole_tokens(self, index: int, choice: WholeChoice) -> Iterator[str]:
        """Yield the fields with the tokens of a choice, if asked for."""
        if not self._prompts:
            return
        if self.has_prompt_in_choices:
            yield ',"prompt_token_ids":'
            yield from ids_json(self._prompts[index])
        yield ',"token_ids":'
        yield from ids_json(choice.token_ids)

    def _prompt_logprobs(self, index: int, choice: WholeChoice) -> Iterator[str]:
        """Yield the field with the log probabilities of a choice's prompt, if asked for."""
        scored = self._scored
        if scored.num_top is None:
            return
        yield ',"prompt_logprobs":'
        yield from prompt_logprobs_json(
            scored.prompts[index], scored.num_top, choice.prompt_logprobs, self._describe
        )

    def _top(self, kind: str) -> dict[str, object]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }

    def _first_events(self, index: int) -> list[str]:
        """Begin a choice: return its first event, if it has one, and note its frame."""
        before = after = ""
        if self._has_same_frame:
            # JSON has no raw control characters, so this one marks where the text goes.
            framed = self._event(index, self._text_fields("\0", "null"), "null")
            before, _, after = framed.partition("\0")
        self._frames[index] = before, after
        first = self._first_fields(index)
        return [self._event(index, first, "null", self._top_tokens(index))] if first else []

    def _event(self, index: int, fields: str, finish_reason: str, top: str = "") -> str:
        choice = f'{index},{fields},"finish_reason":{finish_reason}'
        return event_text(f"{self._open}{choice}}}]{top}{self._usage_so_far()}}}")

    def _usage_so_far(self) -> str:
        """Return the field of an event that has the usage, or says that a later one has it."""
        if self._usage_events is UsageEvents.EACH:
            return f',"usage":{to_json(self._usage.as_json())}'
        return "" if self._usage_events is UsageEvents.NONE else ',"usage":null'

    def _is_shown(self, delta: Delta) -> bool:
        has_tokens = self._prompts and delta.token_ids
        return bool(delta.text or delta.entries or delta.details.echoed or has_tokens)

    def _logprobs(self, *lists: Sequence[LogprobEntry]) -> Iterator[str]:
        """Yield the JSON of the log probabilities, null where none are asked for."""
        return self._logprobs_json(lists) if self._has_logprobs else iter(("null",))

    def _empty_logprobs(self) -> str:
        """Return the log probabilities of the first event of a chat and the last one of a
        completion. As with OpenAI they are empty lists: a stop string may leave no others."""
        return "".join(self._logprobs())

    def _delta_fields(self, delta: Delta) -> str:
        logprobs = "".join(self._logprobs(delta.details.echoed, delta.entries))
        fields = self._text_fields(text_json(delta.text), logprobs)
        return f'{fields},"token_ids":{to_json(delta.token_ids)}' if self._prompts else fields

    def _ending(self, choice: WholeChoice) -> dict[str, object]:
        """Return how a whole choice ended."""
        return {
            "finish_reason": choice.finish_reason and choice.finish_reason.value,
            "stop_reason": choice.stop_reason,
        }

    def _top_tokens(self, index: int) -> str:
        """Return the prompt's tokens as a field beside the choices, where the API has it there."""
        return ""

    @abstractmethod
    def _first_fields(self, index: int) -> str:
        """Return the JSON fields of a choice's first event, '' without such an event."""

    @abstractmethod
    def _text_fields(self, text_json: str, logprobs_json: str) -> str: ...

    @abstractmethod
    def _last_fields(self) -> str: ...

    @abstractmethod
    def _logprobs_json(self, lists: Sequence[Sequence[LogprobEntry]]) -> Iterator[str]: ...

    @abstractmethod
    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        """Return a choice without what may be long: log probabilities and tokens."""


class ChatFormat(AnswerFormat):
    """`/v1/chat/completions`: the first event of a choice carries its role, the last is empty."""

    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    has_prompt_in_choices = False  # all choices have the same prompt

    def _top_tokens(self, index: int) -> str:
        if not self._prompts or index:  # all choices have the same prompt
            return ""
        return f',"prompt_token_ids":{to_json(self._prompts[0])}'

    def _first_fields(self, index: int) -> str:
        return f'"delta":{{"role":"assistant","content":""}},"logprobs":{self._empty_logprobs()}'

    def _text_fields(self, text_json: str, logprobs_json: str) -> str:
        return f'"delta":{{"content":{text_json}}},"logprobs":{logprobs_json}'

    def _last_fields(self) -> str:
        return '"delta":{},"logprobs":null'

    def _logprobs_json(self, lists: Sequence[Sequence[LogprobEntry]]) -> Iterator[str]:
        return chat_logprobs_json(lists, self._describe)

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        text = "".join(choice.text)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            **self._ending(choice),
        }


class CompletionFormat(AnswerFormat):
    """`/v1/completions`: bare text."""

    stream_object = "text_completion"
    whole_object = "text_completion"
    has_prompt_in_choices = True

    def _first_fields(self, index: int) -> str:
        if not self._prompts:
            return ""
        return f'"text":"","logprobs":null,"prompt_token_ids":{to_json(self._prompts[index])}'

    def _text_fields(self, text_json: str, logprobs_json: str) -> str:
        return f'"text":{text_json},"logprobs":{logprobs_json}'

    def _last_fields(self) -> str:
        return f'"text":"","logprobs":{self._empty_logprobs()}'

    def _logprobs_json(self, lists: Sequence[Sequence[LogprobEntry]]) -> Iterator[str]:
        return completion_logprobs_json(lists, self._describe)

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, object]:
        return {
            "index": index,
            "text": "".join(choice.text),
            **self._ending(choice),
        }
