"""One step, as the runner sees it: which tokens to compute, and where to draw the next ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.errors import InternalError, PdserveError
from common.prompt_logprobs import PromptLogprobs
from common.request import SamplingParams, TokenLogprobs


# Hundreds of the next three are made in a step, and a frozen dataclass costs three times as much.
@dataclass(slots=True)
class SampleInput:
    """All inputs of drawing one token: no state is kept between steps.

    `output_index` is the index of the new token in the output. The token lists are read, never
    kept.
    """

    params: SamplingParams
    output_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `token_ids` at positions `start`, `start + 1`, …; their KV goes into `block_table`.

    Positions before `start` are in the cache already. The last `num_drafts` of `token_ids` are
    drafts. With `sample` set, a token is drawn after the last known token and, as long as the drawn
    token equals the next draft, after each draft: `sample` describes the first of them. Without it
    `next_token_id` is the known token after the chunk.

    `num_proposals` is how many drafts a drafter inside the runner (mtp) may propose for the next
    step; it proposes fewer when the block table has no slots for them.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleInput | None
    num_drafts: int = 0
    num_proposals: int = 0
    next_token_id: int | None = None


@dataclass(slots=True)
class DrawnTokens:
    """The tokens that one step drew for one sequence: accepted drafts, then the model's next token.

    `token_ids` has 1 to `num_drafts + 1` entries, all drawn by the model itself: a draft is
    accepted exactly when it equals the token drawn at its position. `logprobs` has one entry for
    each of them if the request asked for log probabilities, else none. `draft_token_ids` are
    proposals for the tokens after the last of them, and `forced_token_ids` the only tokens that can
    follow it under the request's grammar.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    draft_token_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()


class RunnerResult(list[DrawnTokens | None]):
    """What one step drew: one entry per scheduled sequence, None where nothing was drawn.

    `prompt_logprobs` has those of the prompts' tokens that were asked for, by entry.

    `num_steps` above 1: the step was run so many times, each time from the tokens of the time
    before, and every entry has a token of each. That is allowed for a plain step of decodes alone
    after which nothing would be planned but the same step: nobody waits, no entry ends before the
    last time, and none needs a block that it does not have, but for the first `num_recorded` times,
    which the scheduler knows (`Scheduler.go_on`).

    `left_behind` are entries that the step which has begun after this one did not compute: it took
    another token for theirs (`StepBatch`).
    """

    __slots__ = ("left_behind", "num_recorded", "num_steps", "prompt_logprobs")

    def __init__(
        self,
        drawn: Iterable[DrawnTokens | None] = (),
        prompt_logprobs: Mapping[int, PromptLogprobs] | None = None,
        num_steps: int = 1,
        num_recorded: int = 0,
        left_behind: Iterable[int] = (),
    ) -> None:
        super().__init__(drawn)
        self.prompt_logprobs = prompt_logprobs or {}
        self.num_steps = num_steps
        self.num_recorded = num_recorded
        self.left_behind = frozenset(left_behind)

    def only(self, entries: Sequence[int]) -> RunnerResult:
        """Return the part of the result with these entries."""
        found = self.prompt_logprobs
        return RunnerResult(
            [self[entry] for entry in entries],
            {i: found[entry] for i, entry in enumerate(entries) if entry in found},
            left_behind=[i for i, entry in enumerate(entries) if entry in self.left_behind],
        )


class DeviceLost(InternalError):
    """The device of a runner cannot compute any more.

    The node ends, so that its requests are answered elsewhere.
    """


class SequencesFailed(InternalError):
    """Some sequences of a batch have no result; the others' part of `results` is valid.

    `errors` has the reason of each that has none, by its index in the batch.
    """

    def __init__(self, errors: Mapping[int, PdserveError], results: RunnerResult) -> None:
        super().__init__("; ".join(dict.fromkeys(map(str, errors.values()))))
        self.errors = errors
        self.results = results


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The measured cost of a step: `step_s[i]` seconds for a step of `rows[i]` tokens.

    `rows` rise strictly. `draft_s` is the cost of making one draft of one sequence, without its row
    in the step that verifies it (0 for drafters that look tokens up).
    """

    rows: tuple[int, ...]
    step_s: tuple[float, ...]
    draft_s: float = 0.0


OnLayer = Callable[[int], None]
"""Called with the number of a layer of the KV cache, on the thread that executes the step."""


OnQueued = Callable[[], None]
"""Called at most once in a step, on the thread that executes it, when the rest of the step needs
little of the interpreter: before the layers on a CPU, before the draw on a device."""
