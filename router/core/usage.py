"""Tokens of one request, counted once whatever the number of choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.choice_text import Delta


@dataclass(slots=True)
class Usage:
    """Prompt tokens count once per prompt, not once per choice, as OpenAI counts them.

    Choice i answers prompt `i // choices_per_prompt`. The cached tokens of a prompt are those
    that its first choice found: the others may find what the first has just left behind. Drafts
    are those of all choices; a draft that is not in the answer is a rejected one.
    """

    prompt_lengths: tuple[int, ...]
    choices_per_prompt: int
    completion_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict)
    _drafts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def count(self, choice: int, delta: Delta) -> None:
        """Add one delta of one choice."""
        self.completion_tokens += delta.num_tokens
        self._drafts[choice] = (delta.num_drafted, delta.num_accepted)
        prompt, place = divmod(choice, self.choices_per_prompt)
        if place == 0:
            self._cached[prompt] = max(self._cached.get(prompt, 0), delta.num_cached_tokens)

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_lengths)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def accepted_tokens(self) -> int:
        return sum(accepted for _, accepted in self._drafts.values())

    @property
    def rejected_tokens(self) -> int:
        return sum(drafted - accepted for drafted, accepted in self._drafts.values())

    def as_json(self) -> dict[str, object]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.rejected_tokens,
            },
        }
