"""A node tries each grammar before it compiles it, whatever a router let pass."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import InvalidRequest, PdserveError
from common.grammar import Grammar, GrammarKind
from engine.runner.grammars.masks import GrammarMasks
from grammars.compiler import STACK_BYTES, GrammarCompiler
from grammars.trying.trial import NODE_LIMITS, ROUTER_LIMITS
from grammars.trying.trials import GrammarTrials
from tests.support.grammars.hostile_grammars import BOUNDED, LONG
from tests.support.models.tiny_model import make_tiny_model

WAIT_S = 120.0
GOOD = Grammar(GrammarKind.REGEX, "[0-9]{3}")
LIMITS = replace(NODE_LIMITS, cpu_s=1)
"""A node's, but the grammars that meet the limit of CPU take a second instead of six."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def trials(folder: Path) -> Iterator[GrammarTrials]:
    trials = GrammarTrials(folder, "tiny", 320, {1}, LIMITS)
    yield trials
    trials.close()


@pytest.fixture
def masks(folder: Path, trials: GrammarTrials) -> GrammarMasks:
    compiler = GrammarCompiler.load(folder, 320, {1}, trials.weigh)
    assert compiler is not None
    return GrammarMasks(compiler, 320, frozenset({1}), proposes=False)


def outcome(masks: GrammarMasks, grammar: Grammar) -> PdserveError | None:
    compiling = masks.prepare(grammar)
    if compiling is None:
        return None
    error = compiling.exception(WAIT_S)
    assert error is None or isinstance(error, PdserveError)
    return error


def test_a_grammar_that_ends_its_compiler_ends_one_request(masks: GrammarMasks) -> None:
    """One that a router of another version let pass."""
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(7000)) + '\nr7000: "a"'
    for grammar in (Grammar(GrammarKind.LARK, chain), *list(LONG.values())[:2]):
        error = outcome(masks, grammar)
        assert isinstance(error, InvalidRequest)
        assert " to be compiled: wanted " in str(error)
    assert outcome(masks, GOOD) is None


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_counted_is_counted_here_too(name: str, masks: GrammarMasks) -> None:
    assert isinstance(outcome(masks, BOUNDED[name]), InvalidRequest)


def test_the_trials_of_a_node_end_and_it_goes_on(
    masks: GrammarMasks, trials: GrammarTrials
) -> None:
    assert outcome(masks, GOOD) is None
    assert trials.pid is not None
    os.kill(trials.pid, signal.SIGKILL)
    assert outcome(masks, Grammar(GrammarKind.REGEX, "[a-c]{3}")) is None


def test_what_a_router_lets_pass_a_node_can_compile(masks: GrammarMasks) -> None:
    """A chain that takes the most stack that a router's trial has; a node's thread has more."""
    assert ROUTER_LIMITS.stack_bytes < NODE_LIMITS.stack_bytes < STACK_BYTES
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1800)) + '\nr1800: "a"'
    before = threading.stack_size(1 << 20)
    try:
        assert outcome(masks, Grammar(GrammarKind.LARK, chain)) is None
    finally:
        threading.stack_size(before)


def test_a_grammar_is_compiled_once_on_a_node(masks: GrammarMasks) -> None:
    for _ in range(3):
        assert outcome(masks, replace(GOOD)) is None
    statistics = masks.statistics()
    assert statistics.lookups["compiled"] == statistics.num_cached == 1
    assert statistics.cached_bytes > 1000
