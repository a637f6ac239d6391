"""`bench.structured` over a runner without a model: every figure is there, and the judge is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.structured import __main__ as structured
from bench.structured.__main__ import TimedMasks, formats, grammar_of
from bench.structured.schemas import SCHEMAS
from engine.core.step.step_batch import StepBatch
from engine.runner.grammars.masks import PendingMasks
from grammars.compiler import GrammarCompiler
from tests.support.engine import hash_grammars
from tests.support.engine.hash_grammars import EOS_TOKEN_ID, PERSON, VOCAB_SIZE
from tests.support.engine.hash_runner import HashRunner

FEW = {name: SCHEMAS[name] for name in ("name_age_city", "person_with_address")}


class CheckingMasks(TimedMasks):
    """Counts as if each step had checked two draws and refused one: a hash runner checks none."""

    def begin(self, batch: StepBatch, *, asks_afterwards: bool = True) -> PendingMasks | None:
        self.timed.num_checked += 2
        self.timed.num_refused += 1
        return super().begin(batch, asks_afterwards=asks_afterwards)


class FakeModel:
    """What figures ask of `bench.structured.Model`."""

    def __init__(self) -> None:
        self.runner = HashRunner(num_blocks=600)
        self.text = SimpleNamespace(decode=hash_grammars.text_of)

    def compiler(self) -> GrammarCompiler:
        return GrammarCompiler(hash_grammars.compiler().tokenizer)

    def follow_grammars(self, *, proposes: bool) -> TimedMasks:
        masks = CheckingMasks(
            self.compiler(), VOCAB_SIZE, frozenset({EOS_TOKEN_ID}), proposes=proposes
        )
        self.runner._grammars = masks
        return masks

    def prompt(self, text: str) -> tuple[int, ...]:
        return (1, 2, len(text) % 200)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(structured, "SCHEMAS", FEW)
    monkeypatch.setattr(structured, "EXTRACTIONS", (("name_age_city", "Anna is 34."),))
    return FakeModel()


def test_every_schema_is_compiled_anew_in_each_round(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers: list[GrammarCompiler] = []
    new = model.compiler

    def noted() -> GrammarCompiler:
        compilers.append(new())
        return compilers[-1]

    monkeypatch.setattr(model, "compiler", noted)
    figures = structured.compile_figures(model)
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    wanted = {"cached": 0, "compiled": len(FEW), "refused": 0}
    assert [one.lookups() for one in compilers] == [wanted] * structured.COMPILE_ROUNDS


def test_steps_with_and_without_a_schema_are_compared(model: Any) -> None:
    figures = structured.schema_figures(model, 2, 1)
    assert set(figures) == {"step_ms", "step_ratio", "share", "mask_us", "refused"}
    assert 0 < figures["share"] < 1
    assert figures["refused"] == 0.5


def test_forced_tokens_change_no_answer(model: Any) -> None:
    figures = structured.forced_figures(model, 2, 1)
    assert set(figures["tokens_per_s"]) == {"none", "grammar"}
    assert figures["ratio"] > 0


def test_another_answer_ends_the_bench(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(structured.Serving):
        def __init__(self, runner: Any, method: str, max_num_seqs: int) -> None:
            super().__init__(runner, method, max_num_seqs)
            self.is_drafted = method != "none"

        def arrive(self, prompt: tuple[int, ...], sampling: Any) -> Any:
            return super().arrive((7, *prompt) if self.is_drafted else prompt, sampling)

    monkeypatch.setattr(structured, "Serving", Wrong)
    with pytest.raises(SystemExit, match="changed an answer"):
        structured.forced_figures(model, 2, 1)


def test_every_answer_is_judged(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.follow_grammars(proposes=True)
    outcomes = structured.judged(model, 3)
    assert sum(outcomes.values()) == 3
    assert outcomes["refused"] == 0


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ('{"name": "ab", "value": "alpha", "true": true}', "whole"),
        ('{"name": "ab", "value": "gamma", "true": true}', "refused"),
        ('{"name": "ab"', "refused"),
    ],
)
def test_the_judge(text: str, outcome: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "SCHEMAS", {"person": PERSON})
    ids = hash_grammars.token_ids(text)
    whole: Any = SimpleNamespace(output_token_ids=[*ids, EOS_TOKEN_ID])
    assert structured._judge(model, "person", whole) == outcome
    cut: Any = SimpleNamespace(output_token_ids=ids)
    assert structured._judge(model, "person", cut) == "cut"


def test_the_judge_knows_days() -> None:
    assert formats().conforms("2024-02-29T10:00:00Z", "date-time")
    assert not formats().conforms("2023-02-29T10:00:00Z", "date-time")


def test_a_grammar_keeps_its_letters() -> None:
    assert "é" in grammar_of({"const": "é"}).text


def test_there_are_a_hundred_schemas() -> None:
    """The groups share no name: the later one would replace the other."""
    assert len(SCHEMAS) == 100
