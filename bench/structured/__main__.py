"""What answers under JSON schemas cost: `python -m bench.structured --json`.

The demo model, in this process, driven as a node's step loop drives it. One JSON line:

    compile.p50_ms, .p99_ms     CPU time from a schema's text to a matcher, over 100 schemas, anew
    schema.b<N>.step_ratio      the median decode step of N sequences under a schema, over that of N
                                without one, on a node without drafts (the default); the two take
                                turns answer by answer
    schema.b<N>.share           the part of such a step in which the step's thread checks draws, and
                                fills the masks of those that are refused
    schema.b<N>.refused         the part of the draws that are refused
    schema.b<N>.mask_us         the time in which one mask is filled
    forced.b<N>.ratio           tokens per second with forced tokens as drafts, over those without,
                                on prompts that ask for an extraction; the answers must be the same
    forced.b<N>.tokens_per_s    with and without
    judged                      with `--generations N`: N answers at temperature 1, by turns under
                                each schema: how many are whole, how many were cut by their length,
                                and how many of the whole ones `jsonschema` refuses (0 or an error)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import jsonschema

from bench.structured.schemas import SCHEMAS
from common.grammar import Grammar, GrammarKind
from common.ids import AttemptId
from common.kv.token_budget import num_speculative_tokens
from common.request import GenerationRequest, SamplingParams
from common.settings.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.core.planner_contract import StepLimits
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.speculation.speculation import make_speculation
from engine.core.step.step_batch import StepBatch
from engine.runner.grammars.allowed_tokens import AllowedTokens
from engine.runner.grammars.masks import GrammarMasks, PendingMasks
from engine.runner.model_runner import ModelRunner
from engine.runner.start.load import load_model_runner
from grammars.compiler import GrammarCompiler
from pdserve.checkpoints.resolve import resolve_checkpoint
from router.text.text_model import TextModel

BATCHES = (8, 32)
FORCED_BATCHES = (1, 8)
COMPILE_ROUNDS = 5
MAX_ANSWER_TOKENS = 250
EXTRACTIONS = (
    ("name_age_city", "Anna is 34 years old and lives in Paris."),
    ("name_age_city", "My neighbour Tom, 71, moved to London last year."),
    ("flight", "Flight LH123 departs on 2024-05-01 at 10:30 UTC, seat 12A."),
    ("person_with_address", "Ben lives at 5 Main Street, 10115 Berlin, Germany."),
    ("car", "A Volkswagen with the plate B-AB 123 and five doors."),
    ("server", "The server 10.0.0.7 listens on port 443 with TLS."),
    ("moderation", "You are all wonderful people."),
    ("weather", "It is 21 degrees and sunny in Rome."),
)
_ENDLESS_S = 1e9
_ENGINE = EngineConfig(max_num_seqs=max(BATCHES), kv_cache_memory=1 << 30)


@dataclass(slots=True)
class Timed:
    """What a `GrammarMasks` took on the step's thread."""

    in_step_s: float = 0.0
    num_checked: int = 0
    num_refused: int = 0
    step_s: list[float] = field(default_factory=list)


class TimedMasks(GrammarMasks):
    """A `GrammarMasks` that notes what it takes."""

    timed = Timed()

    def begin(self, batch: StepBatch, *, asks_afterwards: bool = True) -> PendingMasks | None:
        """Begin as usual; waiting is timed too."""
        began_s = time.perf_counter()
        pending = super().begin(batch, asks_afterwards=asks_afterwards)
        self.timed.in_step_s += time.perf_counter() - began_s
        return None if pending is None else _TimedWait(pending, self.timed)

    def checked(self, job: Any, token_id: int, logits: Any) -> int | None:
        """Check a token as usual."""
        began_s = time.perf_counter()
        checked = super().checked(job, token_id, logits)
        self.timed.in_step_s += time.perf_counter() - began_s
        self.timed.num_checked += 1
        self.timed.num_refused += checked is None
        return checked

    def fill(self, jobs: Any, failures: Any) -> AllowedTokens:
        """Fill masks as usual."""
        began_s = time.perf_counter()
        filled = super().fill(jobs, failures)
        self.timed.in_step_s += time.perf_counter() - began_s
        return filled

    def propose(self, batch: StepBatch, results: Any) -> None:
        """Propose as usual."""
        began_s = time.perf_counter()
        super().propose(batch, results)
        self.timed.in_step_s += time.perf_counter() - began_s


class _TimedWait(PendingMasks):
    def __init__(self, pending: PendingMasks, timed: Timed) -> None:
        super().__init__(
            pending._allowed, pending.unmasked, pending._filled, pending.failures, pending._counters
        )
        self._timed = timed

    def wait(self) -> Any:
        """Wait as usual."""
        began_s = time.perf_counter()
        allowed = super().wait()
        self._timed.in_step_s += time.perf_counter() - began_s
        return allowed


class Serving:
    """A scheduler with the blocks of a runner to itself."""

    def __init__(self, runner: ModelRunner, method: str, max_num_seqs: int) -> None:
        config = SpeculationConfig(speculative_method=method)
        self._runner = runner
        self._ids = count(1)
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=_ENGINE.max_num_batched_tokens,
                block_size=runner.layout.block_size,
                max_model_len=runner.max_model_len,
                num_speculative_tokens=num_speculative_tokens(method, 0),
            ),
            num_blocks=runner.num_blocks,
            fingerprint=runner.layout.fingerprint,
            eos_token_ids=runner.eos_token_ids,
            enable_prefix_caching=False,
            speculation=make_speculation(config, runner.step_costs),
        )
        self.decode_s = 0.0
        self.num_decoded = 0

    def arrive(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Sequence:
        """Add a request, whose grammar is compiled before."""
        number, grammar = next(self._ids), sampling.grammar
        compiling = None if grammar is None else self._runner.prepare_grammar(grammar)
        if compiling is not None:
            compiling.result()
        request = GenerationRequest(
            id=AttemptId(f"bench-{number}", 1),
            prompt_token_ids=prompt,
            sampling=sampling,
            deadline_s=_ENDLESS_S,
        )
        sequence = Sequence(number, request)
        self.scheduler.add(sequence)
        return sequence

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> float | None:
        """Run a step; return its seconds if it contains no prompt."""
        began_s = time.perf_counter()
        step = self.scheduler.plan()
        has_prompts = any(not sequence.output_token_ids for sequence in step.sequences)
        outputs = self.scheduler.apply(step, self._runner.execute(step.batch))
        took_s = step.took_s = time.perf_counter() - began_s
        if has_prompts:
            return None
        self.decode_s += took_s
        self.num_decoded += sum(len(output.token_ids) for output in outputs)
        return took_s


class Model:
    """The model, its tokenizer and its compiler."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        self.folder = folder
        self.text = TextModel.load(folder, "", 0)
        self.runner = load_model_runner(
            ModelConfig(model=str(folder)),
            EngineConfig(
                max_num_seqs=_ENGINE.max_num_seqs,
                kv_cache_memory=_ENGINE.kv_cache_memory,
                num_threads=num_threads,
            ),
            speculation=SpeculationConfig(speculative_method="grammar"),
        )
        self.runner.warm_up()
        self.follow_grammars(proposes=True)

    def follow_grammars(self, *, proposes: bool) -> TimedMasks:
        """Draw under grammars; a node's masks propose drafts where the runner takes them."""
        runner = self.runner
        masks = TimedMasks(
            self.compiler(), runner.vocab_size, runner.eos_token_ids, proposes=proposes
        )
        runner.grammars = masks
        return masks

    def compiler(self) -> GrammarCompiler:
        """Return a compiler that has compiled nothing."""
        found = GrammarCompiler.load(self.folder, self.text.vocab_size, self.text.eos_token_ids)
        assert found is not None
        return found

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return a conversation's tokens."""
        rendered = self.text.render_chat([{"role": "user", "content": text}])
        return self.text.encode(rendered, add_special_tokens=False, param="messages")


def grammar_of(schema: dict[str, Any]) -> Grammar:
    """Return the grammar of a schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def compile_figures(model: Model) -> dict[str, float]:
    """Measure compilations."""
    took_ms = []
    for _ in range(COMPILE_ROUNDS):
        compiler = model.compiler()
        for schema in SCHEMAS.values():
            began_s = time.thread_time()
            compiler.matcher(grammar_of(schema))
            took_ms.append(1000 * (time.thread_time() - began_s))
    return {
        "p50_ms": round(median(took_ms), 2),
        "p99_ms": round(quantiles(took_ms, n=100)[98], 2),
    }


def schema_figures(model: Model, batch: int, num_steps: int) -> dict[str, float]:
    """Measure decode steps with and without a schema, by turns."""
    people = {"type": "array", "items": SCHEMAS["person_with_address"], "minItems": 200}
    prompt = model.prompt("List people with their addresses as JSON.")
    steps: dict[bool, list[float]] = {False: [], True: []}
    masks = model.follow_grammars(proposes=False)
    timed = masks.timed = Timed()
    rounds = max(1, num_steps // 50)
    for number in range(rounds):
        for has_schema in (number % 2 == 0, number % 2 == 1):
            serving = Serving(model.runner, "none", batch)
            for seed in range(batch):
                sampling = SamplingParams(
                    max_tokens=60, seed=seed, ignore_eos=not has_schema,
                    grammar=grammar_of(people) if has_schema else None,
                )  # fmt: skip
                serving.arrive(prompt, sampling)
            while serving.is_busy:
                before_s = timed.in_step_s
                took_s = serving.step()
                if took_s is None:
                    timed.in_step_s = before_s
                else:
                    steps[has_schema].append(took_s)
    filled = masks.statistics()
    with_s, without_s = median(steps[True]), median(steps[False])
    return {
        "step_ms": round(1000 * without_s, 2),
        "step_ratio": round(with_s / without_s, 4),
        "share": round(timed.in_step_s / sum(steps[True]), 4),
        "mask_us": round(1e6 * filled.masks_s / filled.num_masks, 1),
        "refused": round(timed.num_refused / timed.num_checked, 4),
    }


def forced_figures(model: Model, batch: int, rounds: int) -> dict[str, Any]:
    """Measure extractions with and without forced tokens as drafts, by turns."""
    model.follow_grammars(proposes=True)
    servings = {method: Serving(model.runner, method, batch) for method in ("none", "grammar")}
    asked = list(islice(cycle(EXTRACTIONS), max(batch, len(EXTRACTIONS))))
    groups = [asked[first : first + batch] for first in range(0, len(asked), batch)]
    for _ in range(rounds):
        for group in groups:
            answers = []
            for serving in servings.values():
                sequences = [
                    serving.arrive(
                        model.prompt(f"{text} Extract this as JSON."),
                        SamplingParams(
                            max_tokens=120, temperature=0.0, grammar=grammar_of(SCHEMAS[name])
                        ),
                    )
                    for name, text in group
                ]
                while serving.is_busy:
                    serving.step()
                answers.append([one.output_token_ids for one in sequences])
            if answers[0] != answers[1]:
                sys.exit("forced tokens as drafts changed an answer")
    speeds = {name: one.num_decoded / one.decode_s for name, one in servings.items()}
    return {
        "ratio": round(speeds["grammar"] / speeds["none"], 3),
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
    }


def judged(model: Model, num_answers: int) -> dict[str, int]:
    """Generate answers under every schema in turn, and check them with `jsonschema`."""
    serving = Serving(model.runner, "grammar", max(BATCHES))
    outcomes: Counter[str] = Counter(whole=0, cut=0, refused=0)
    names = list(islice(cycle(SCHEMAS), num_answers))
    for first in range(0, num_answers, 100):
        sequences = [
            serving.arrive(
                model.prompt(f"Invent one {name.replace('_', ' ')} as JSON."),
                SamplingParams(
                    max_tokens=MAX_ANSWER_TOKENS,
                    seed=first + number,
                    grammar=grammar_of(SCHEMAS[name]),
                ),
            )
            for number, name in enumerate(names[first : first + 100])
        ]
        while serving.is_busy:
            serving.step()
        for name, sequence in zip(names[first:], sequences, strict=False):
            outcomes[_judge(model, name, sequence)] += 1
        print(f"{first + len(sequences)} answers: {dict(outcomes)}", file=sys.stderr, flush=True)
    return dict(outcomes)


def formats() -> jsonschema.FormatChecker:
    """Return the judge's formats: those of draft 2020-12, and the day of a `date-time`.

    Without further packages `jsonschema` does not look at `date-time`.
    """
    checker = jsonschema.FormatChecker(())
    checker.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    checker.checks("date-time", raises=ValueError)(
        lambda value: not isinstance(value, str) or bool(date.fromisoformat(value[:10]))
    )
    return checker


def _judge(model: Model, name: str, sequence: Sequence) -> str:
    ids = sequence.output_token_ids
    if ids[-1] not in model.runner.eos_token_ids:
        return "cut"
    text = model.text.decode(ids)
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=formats())
    try:
        validator.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as wrong:
        print(f"{name}: {text}\n{wrong}", file=sys.stderr)
        return "refused"
    return "whole"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.structured", description="The cost of answers under JSON schemas."
    )
    parser.add_argument("--model", default="demo", help="a Hugging Face folder or .gguf file")
    parser.add_argument("--steps", type=int, default=1200, help="decode steps of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of the extractions")
    parser.add_argument("--generations", type=int, default=0, help="answers to be judged")
    parser.add_argument("--num-threads", type=int, default=0, help="CPU threads (0: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    arguments = parser.parse_args()
    model = Model(resolve_checkpoint(arguments.model), arguments.num_threads)
    figures: dict[str, Any] = {}
    if arguments.generations:
        figures["judged"] = judged(model, arguments.generations)
        if figures["judged"]["refused"]:
            sys.exit(f"answers break their schemas: {figures['judged']}")
    if arguments.steps:
        figures["compile"] = compile_figures(model)
        print("compile", figures["compile"], file=sys.stderr, flush=True)
        figures["schema"] = {}
        for batch in BATCHES:
            figures["schema"][f"b{batch}"] = schema_figures(model, batch, arguments.steps)
            print(f"schema batch {batch}", figures["schema"][f"b{batch}"], file=sys.stderr)
    if arguments.rounds:
        figures["forced"] = {}
        for batch in FORCED_BATCHES:
            figures["forced"][f"b{batch}"] = forced_figures(model, batch, arguments.rounds)
            print(f"forced batch {batch}", figures["forced"][f"b{batch}"], file=sys.stderr)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
