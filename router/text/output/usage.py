"""The tokens of one request, counted once for any number of choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from typing_extensions import TypedDict

from common.request import RequestCounts
from common.wire_types import Count
from router.text.output.choice_text import Delta


class UsageEvents(Enum):
    """Which events of a stream have the usage: none, one at the end, or each one, so far."""

    NONE = "none"
    LAST = "last"
    EACH = "each"


class CachedTokens(TypedDict):
    cached_tokens: Count


class OutputTokens(TypedDict):
    reasoning_tokens: Count
    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class UsageAnswer(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputTokens


@dataclass(slots=True)
class Usage:
    """Token counts of a request. A prompt counts once, not once per choice, as at OpenAI.

    Choice i answers prompt `i // choices_per_prompt`. The cached tokens of a prompt are those that
    its first choice found, because the others may find what the first has just cached. Drafts are
    those of all choices; a draft that is not in the answer was rejected. Tokens of thinking are
    among those of the completion.
    """

    prompt_lengths: tuple[int, ...]
    choices_per_prompt: int
    completion_tokens: int = 0
    _counts: dict[int, RequestCounts] = field(default_factory=dict)
    """The latest counts of each choice."""
    _num_thinking: dict[int, int] = field(default_factory=dict)

    def count(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Add the next deltas of one choice."""
        for delta in deltas:
            self.completion_tokens += delta.num_tokens
            if delta.details.counts is not None:
                self._counts[choice] = delta.details.counts
            if delta.details.num_thinking is not None:
                self._num_thinking[choice] = delta.details.num_thinking

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    @property
    def cached_tokens(self) -> int:
        firsts = [choice for choice in self._counts if choice % self.choices_per_prompt == 0]
        return sum(self._counts[choice].num_cached_tokens for choice in firsts)

    @property
    def thinking_tokens(self) -> int:
        return sum(self._num_thinking.values())

    @property
    def accepted_tokens(self) -> int:
        return sum(counts.num_accepted for counts in self._counts.values())

    @property
    def rejected_tokens(self) -> int:
        return sum(one.num_drafted - one.num_accepted for one in self._counts.values())

    def as_json(self) -> UsageAnswer:
        """Return OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.thinking_tokens,
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.rejected_tokens,
            },
        }
