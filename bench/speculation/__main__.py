"""The speed-up by speculation: `python -m bench.speculation --json`.

The demo model answers three kinds of prompts (`bench.speculation.prompts`), greedily, to its own
end or at most `--max-tokens`, with each speculative method and without any. One JSON line:

    <kind>.b<N>.<method>.tokens_per_s        decoded tokens per second at batch N
    <kind>.b<N>.<method>.ratio               that, over the same without speculation
    <kind>.b<N>.<method>.acceptance_length   tokens that a sequence gains per step, its own included
    <kind>.b<N>.<method>.drafts_verified     by position: how often a step verified a first draft;
                                             a second one, after a right first one; and so on
    <kind>.b<N>.<method>.drafts_accepted     the share of them that was accepted

Batch N is N requests that arrive at once: each prompt once at most while there are enough, so that
no method knows an answer beforehand. The time is that of the steps that decode; the prompts' own
step, the same for all, is left out. The real scheduler and the real runner are driven as a node's
step loop drives them; each method has blocks of its own, and the methods take turns step by step,
so that noise of the machine affects all.

Answers must be the same with every method: the run ends with an error when one token differs.
`mtp` is measured when the model has a layer for it; it has a runner of its own.

Which drafts are made depends on what steps were measured to cost. With `--always-draft` further
rows count as free, so every step verifies as many drafts as the method has, and `mtp` takes those
of its layer alone, never looked-up ones. The shares then depend on no time, and `tokens_per_s` and
`ratio` say nothing about a node.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path

from bench.speculation.prompts import PROMPTS
from common.errors import CheckpointError, ConfigError
from common.files.cache_folder import cache_root
from common.ids import AttemptId
from common.kv.token_budget import num_speculative_tokens
from common.request import GenerationRequest, SamplingParams
from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.core.planner_contract import StepLimits
from engine.core.runner_contract import DrawnTokens, ScheduledSequence, StepCosts
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.speculation.draft_length import DraftLength
from engine.core.speculation.drafter import NoDrafter
from engine.core.speculation.speculation import Speculation, make_speculation
from engine.core.step.step_batch import batch_of
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from pdserve.checkpoints.resolve import resolve_checkpoint
from pdserve.checkpoints.speculative_model import resolve_speculation
from router.text.text_model import TextModel

METHODS = ("none", "ngram", "suffix", "mtp")
BATCHES = (1, 8, 32)
_ENGINE = EngineConfig(max_num_seqs=max(BATCHES))
_KV_CACHE_PER_METHOD = 1 << 30
_WARM_UP_TOKENS = 12
_ENDLESS_S = 1e9
_FREE_ROWS = StepCosts(rows=(1, 2), step_s=(1.0, 1.0))

Prompt = tuple[int, ...]


@dataclass(slots=True)
class Measured:
    """Sums over everything that one method decoded."""

    decode_s: float = 0.0
    num_tokens: int = 0
    num_sequence_steps: int = 0
    num_verified: Counter[int] = field(default_factory=Counter)
    num_accepted: Counter[int] = field(default_factory=Counter)
    """Accepted drafts by position, from 0. What follows a wrong one does not count."""

    def verified(
        self, batch: Iterable[ScheduledSequence], results: Iterable[DrawnTokens | None]
    ) -> None:
        """Count the drafts of a step up to the first wrong one, and those that are right."""
        for one, drawn in zip(batch, results, strict=True):
            if drawn is not None:
                num_accepted = len(drawn.token_ids) - 1
                self.num_verified.update(range(min(one.num_drafts, num_accepted + 1)))
                self.num_accepted.update(range(num_accepted))

    def figures(self, base: Measured) -> dict[str, object]:
        """Return the printed figures; `base` is the same work without speculation."""
        positions = sorted(self.num_verified)
        accepted = [self.num_accepted[n] / self.num_verified[n] for n in positions]
        return {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "ratio": round(self.tokens_per_s / base.tokens_per_s, 3),
            "acceptance_length": round(self.num_tokens / self.num_sequence_steps, 2),
            "drafts_verified": [self.num_verified[n] for n in positions],
            "drafts_accepted": [round(share, 3) for share in accepted],
        }

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s


class Serving:
    """One method: a scheduler with blocks of its own, on a runner that others use too."""

    def __init__(
        self,
        runner: ModelRunner,
        method: str,
        first_block: int,
        num_blocks: int,
        *,
        always_draft: bool = False,
    ) -> None:
        self.method = method
        self._always_draft = always_draft
        self.measured = Measured()
        self._runner = runner
        self._first_block = first_block
        self._num_blocks = num_blocks
        self._sequences: list[Sequence] = []
        self.begin(max(BATCHES))

    def begin(self, max_num_seqs: int) -> None:
        """Reset everything but the sums, and serve at most `max_num_seqs` at once."""
        runner = self._runner
        self._ids = count(1)
        self._scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=_ENGINE.max_num_batched_tokens,
                block_size=runner.layout.block_size,
                max_model_len=runner.max_model_len,
                num_speculative_tokens=num_speculative_tokens(self.method, 0),
            ),
            num_blocks=self._num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=runner.eos_token_ids,
            enable_prefix_caching=False,
            speculation=self._speculation(),
        )

    def _speculation(self) -> Speculation | None:
        most = num_speculative_tokens(self.method, 0)
        if self._always_draft and self.method == "mtp":
            return Speculation(self.method, most, NoDrafter(), DraftLength(_FREE_ROWS, most))
        config = SpeculationConfig(speculative_method=self.method)
        costs = _FREE_ROWS if self._always_draft else self._runner.step_costs
        return make_speculation(config, costs)

    @property
    def is_busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def arrive(self, prompts: list[Prompt], max_tokens: int) -> None:
        """Add prompts that arrive at once."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._sequences = []
        for prompt in prompts:
            request = GenerationRequest(
                id=AttemptId("bench", 1),
                prompt_token_ids=prompt,
                sampling=sampling,
                deadline_s=_ENDLESS_S,
            )
            self._sequences.append(Sequence(next(self._ids), request))
            self._scheduler.add(self._sequences[-1])

    def answers(self) -> list[tuple[int, ...]]:
        """Return the outputs of the prompts that arrived last, in order."""
        return [tuple(sequence.output_token_ids) for sequence in self._sequences]

    def step(self) -> None:
        """Plan, compute and apply one step; its time counts if it contains no prompt."""
        started_s = time.perf_counter()
        step = self._scheduler.plan()
        assert step.num_preempted == 0, "the pool is large enough for everyone"
        has_prompts = any(not sequence.output_token_ids for sequence in step.sequences)
        batch = [
            replace(one, block_table=[block + self._first_block for block in one.block_table])
            for one in step.batch
        ]
        results = self._runner.execute(batch_of(batch))
        outputs = self._scheduler.apply(step, results)
        if not has_prompts:
            self.measured.verified(batch, results)
            self.measured.decode_s += time.perf_counter() - started_s
            self.measured.num_sequence_steps += len(outputs)
            self.measured.num_tokens += sum(len(output.token_ids) for output in outputs)


class SameAnswers:
    """The first answer to each prompt; every later one must equal it."""

    def __init__(self) -> None:
        self._first: dict[Prompt, tuple[str, tuple[int, ...]]] = {}

    def check(self, prompt: Prompt, output: tuple[int, ...], where: str) -> None:
        """Exit with an error that names the first difference, if there is one."""
        first_where, first = self._first.setdefault(prompt, (where, output))
        if output == first:
            return
        pairs = zip(output, first, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output), len(first)))
        sys.exit(
            f"{where} answered otherwise than {first_where}: output token {index} of "
            f"{len(output)} and {len(first)} differs, the prompt begins with {prompt[:8]}"
        )


def load_serving(
    model: ModelConfig, num_threads: int, methods: list[str], *, always_draft: bool
) -> list[Serving]:
    """Load a runner for the look-up methods, and one with the drafting layer."""
    look_up = [method for method in methods if method != "mtp"]
    serving = _load(model, num_threads, look_up, always_draft=always_draft)
    if "mtp" in methods:
        try:
            serving += _load(model, num_threads, ["mtp"], always_draft=always_draft)
        except (CheckpointError, ConfigError) as error:
            print(f"mtp is not measured: {error}", file=sys.stderr)
    return serving


def _load(
    model: ModelConfig, num_threads: int, methods: list[str], *, always_draft: bool
) -> list[Serving]:
    memory = len(methods) * _KV_CACHE_PER_METHOD
    config = SpeculationConfig(speculative_method=methods[-1])
    runner = load_model_runner(
        model,
        replace(_ENGINE, num_threads=num_threads, kv_cache_memory=memory),
        speculation=resolve_speculation(config, Path(model.model)),
        # Both runners read the same pages, as the nodes of a machine do: with weights of its own,
        # each one would find the other's in the processor's caches.
        packed_folder=cache_root() / "packed",
    )
    runner.warm_up()
    share = runner.num_blocks // len(methods)
    return [
        Serving(runner, method, i * share, share, always_draft=always_draft)
        for i, method in enumerate(methods)
    ]


def tokenised_prompts(folder: Path) -> dict[str, list[Prompt]]:
    """Return every prompt, tokenised like by the router, with the checkpoint's chat template."""
    text = TextModel.load(folder, "", 0)

    def tokens(prompt: str) -> Prompt:
        rendered = text.render_chat([{"role": "user", "content": prompt}])
        return text.encode(rendered, add_special_tokens=False, param="messages")

    return {kind: [tokens(prompt) for prompt in prompts] for kind, prompts in PROMPTS.items()}


def arrivals(prompts: list[Prompt], batch: int) -> list[list[Prompt]]:
    """Return groups that arrive at once: each prompt alone, or `batch` of them, repeated if few."""
    if batch == 1:
        return [[prompt] for prompt in prompts]
    repeated = (prompt for _ in count() for prompt in prompts)
    return [list(islice(repeated, batch))]


def measure(
    serving: list[Serving],
    prompts: list[Prompt],
    batch: int,
    max_tokens: int,
    answers: SameAnswers,
) -> None:
    """Answer the prompts at one batch with every method, each from the beginning."""
    for one in serving:
        one.begin(batch)
    for arriving in arrivals(prompts, batch):
        for one in serving:
            one.arrive(arriving, max_tokens)
        while any(one.is_busy for one in serving):
            for one in serving:
                if one.is_busy:
                    one.step()
        for one in serving:
            for prompt, output in zip(arriving, one.answers(), strict=True):
                answers.check(prompt, output, f"{one.method} at batch {batch}")


def main() -> None:
    """Parse, measure, print one JSON line last."""
    arguments = _parsed()
    methods = [m for m in METHODS if m == "none" or m in arguments.methods]
    folder = resolve_checkpoint(arguments.model)
    prompts = tokenised_prompts(folder)
    model = ModelConfig(model=str(folder), activation_dtype=arguments.activation_dtype)
    serving = load_serving(
        model, arguments.num_threads, methods, always_draft=arguments.always_draft
    )
    measure(serving, prompts["code"][:1], 1, _WARM_UP_TOKENS, SameAnswers())
    figures: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    answers = SameAnswers()
    for kind in arguments.kinds:
        figures[kind] = {}
        for batch in arguments.batches:
            for one in serving:
                one.measured = Measured()
            for _ in range(arguments.rounds):
                measure(serving, prompts[kind], batch, arguments.max_tokens, answers)
            base = serving[0].measured
            found = {one.method: one.measured.figures(base) for one in serving}
            figures[kind][f"b{batch}"] = found
            for method, values in found.items():
                print(f"{kind:10} batch {batch:2} {method:7}", values, file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({**figures, "same_answers": True}))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation", description="Speed with and without speculation."
    )
    parser.add_argument("--model", default="demo", help="a Hugging Face folder or .gguf file")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--kinds", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of every prompt")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads (0: all cores)")
    parser.add_argument("--activation-dtype", choices=("auto", "float32", "int8"), default="auto")
    parser.add_argument("--always-draft", action="store_true", help="whatever a draft costs")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    return parser.parse_args()


if __name__ == "__main__":
    main()
