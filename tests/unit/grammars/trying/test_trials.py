"""Grammars tried in processes of their own: what a trial takes, and what its end costs others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from common.child_process import start_helper
from common.errors import InvalidRequest, Overloaded
from common.grammar import Grammar, GrammarKind
from grammars.gbnf import Gbnf
from grammars.parts import GrammarParts, SchemaPart
from grammars.trying import server, trial
from grammars.trying import trials as trials_module
from grammars.trying.messages import Trial, packed, trial_fields, unpacked, verdict_of
from grammars.trying.trial import ROUTER_LIMITS, TrialLimits
from grammars.trying.trials import GrammarTrials
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.processes import is_alive
from tests.support.examples import everyday
from tests.support.grammars.hostile_grammars import CRASHING, LONG
from tests.support.grammars.patient_trials import NEVER_S, start_patient
from tests.support.models.tiny_model import make_tiny_model
from tests.support.observing.process_tasks import children_of

WAIT_S = 60.0
GOOD = Trial(Grammar(GrammarKind.REGEX, "[0-9]{3}"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "start_helper", start_patient)
    monkeypatch.setattr(trials_module, "MAX_SILENCE_S", NEVER_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def trials(folder: Path) -> Iterator[GrammarTrials]:
    trials = GrammarTrials(folder, "tiny", 320, {1}, ROUTER_LIMITS)
    yield trials
    trials.close()


def refusal(trials: GrammarTrials, grammar: Grammar) -> str:
    error = trials.begin(Trial(grammar)).exception(WAIT_S)
    assert isinstance(error, InvalidRequest), error
    assert error.param == (grammar.source or None)
    return str(error)


def test_what_can_be_followed_is_weighed(trials: GrammarTrials) -> None:
    assert trials.pid is None, "nothing starts before the first grammar"
    small = trials.weigh(GOOD.grammar)  # type: ignore[arg-type]
    value = {"enum": [f"value {i}" for i in range(5000)]}
    large = trials.weigh(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value)))
    assert 0 < small < 1 << 20 < large < 64 << 20


def test_what_weighs_too_much_is_refused(folder: Path) -> None:
    trials = GrammarTrials(folder, "tiny", 320, {1}, replace(ROUTER_LIMITS, compiled_bytes=9 << 20))
    value = {"enum": ["x" * 60_000, "x" * 59_999 + "y"]}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), "guided_json")
    try:
        assert "MiB when it is compiled: wanted at most 9 MiB" in refusal(trials, grammar)
    finally:
        trials.close()


def test_what_weighs_more_than_all_that_is_kept_is_refused_too() -> None:
    class TooSmall:
        def check(self, grammar: Grammar, parts: GrammarParts) -> Grammar:
            raise Overloaded("no room")

    compiler: Any = TooSmall()
    with pytest.raises(InvalidRequest, match="192 MiB when it is compiled: wanted at most 64 MiB"):
        trial.verdict(GOOD, compiler, ROUTER_LIMITS)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (TrialLimits(1, 8 << 30, 8 << 20, 64 << 20), "more than 1 s of CPU"),
        (TrialLimits(30, 32 << 20, 8 << 20, 64 << 20), "more than 32 MiB to be compiled"),
    ],
)
def test_each_limit_holds_alone(limits: TrialLimits, told: str, folder: Path) -> None:
    trials = GrammarTrials(folder, "tiny", 320, {1}, limits)
    try:
        assert told in refusal(trials, LONG["patterns that multiply"])
    finally:
        trials.close()


def test_gbnf_is_translated(trials: GrammarTrials) -> None:
    verdict = trials.begin(Trial(Gbnf('root ::= "a" | "b"', "guided_grammar"))).result(WAIT_S)
    assert verdict.instead == Grammar(GrammarKind.LARK, 'start: "a"\n     | "b"\n\n')
    error = trials.begin(Trial(Gbnf("root ::= (", "guided_grammar"))).exception(WAIT_S)
    assert isinstance(error, InvalidRequest)
    assert "guided_grammar is no grammar" in str(error)


def test_the_part_at_fault_is_named(trials: GrammarTrials) -> None:
    part = SchemaPart(schema={"type": "nonsense"}, source="tools.0.parameters", is_lenient=False)
    whole = Grammar(GrammarKind.LARK, 'start: %json {"type": "nonsense"}', "tools")
    error = trials.begin(Trial(whole, GrammarParts(schemas=(part,)))).exception(WAIT_S)
    assert isinstance(error, InvalidRequest)
    assert error.param == "tools.0.parameters"


@pytest.mark.parametrize("name", CRASHING)
def test_a_crash_is_the_clients(name: str, trials: GrammarTrials) -> None:
    # It ends a fork, and not the process that the others wait for.
    trials.weigh(GOOD.grammar)  # type: ignore[arg-type]
    pid = trials.pid
    assert "of stack to be compiled" in refusal(trials, CRASHING[name])
    assert trials.weigh(GOOD.grammar) > 0  # type: ignore[arg-type]
    assert trials.pid == pid


def try_small_ones(trials: GrammarTrials) -> None:
    """Five small trials of another client, one after the other.

    Together they take a fraction of the processor time of a long trial.
    """
    for number in range(5):
        small = trials.begin(Trial(Grammar(GrammarKind.REGEX, f"a{number}")), "other")
        assert small.result(WAIT_S) is not None


@pytest.mark.covers("G13")
@pytest.mark.parametrize("name", list(LONG)[-everyday(1, of=len(LONG)) :])
def test_a_limit_is_the_clients_and_the_others_do_not_wait(
    name: str, trials: GrammarTrials
) -> None:
    long = trials.begin(Trial(LONG[name]), "one")
    try_small_ones(trials)
    assert not long.done()
    error = long.exception(WAIT_S)
    assert isinstance(error, InvalidRequest)
    assert " to be compiled: wanted a " in str(error) or "when it is compiled" in str(error)


def test_one_client_with_many_long_ones_keeps_nobody_waiting(trials: GrammarTrials) -> None:
    hostile = [trials.begin(Trial(LONG["patterns that multiply"]), "one") for _ in range(20)]
    try_small_ones(trials)
    assert not all(one.done() for one in hostile)
    for one in hostile:
        one.cancel()
    assert trials.weigh(Grammar(GrammarKind.REGEX, "b")) > 0, "what is cancelled is forgotten"


def test_a_process_that_ends_costs_one_more_try(trials: GrammarTrials) -> None:
    trials.weigh(GOOD.grammar)  # type: ignore[arg-type]
    first = trials.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    waiting = [trials.begin(GOOD) for _ in range(3)]
    os.kill(first, signal.SIGKILL)
    assert all(one.result(WAIT_S).num_bytes for one in waiting)
    assert trials.pid != first


def fork_of(trials: GrammarTrials, *others: int) -> int:
    """The process of the one trial that runs, once there is one that is none of the `others`."""

    def forks() -> list[int]:
        assert trials.pid is not None
        return [one for one in children_of(trials.pid) if one not in others]

    wait_until(lambda: bool(forks()), "a trial runs")
    return forks()[0]


def test_a_trial_that_is_ended_from_outside_is_tried_once_more(trials: GrammarTrials) -> None:
    """Where memory runs out the kernel ends it, and twice is the grammar's fault."""
    trials.weigh(GOOD.grammar)  # type: ignore[arg-type]
    asked = trials.begin(Trial(LONG["patterns that multiply"]))
    first = fork_of(trials)
    os.kill(first, signal.SIGKILL)
    second = fork_of(trials, first)
    assert not asked.done()
    os.kill(second, signal.SIGKILL)
    error = asked.exception(WAIT_S)
    assert isinstance(error, InvalidRequest)
    assert "ended the process that compiles it twice, at last with -9" in str(error)


def test_forks_end_with_the_process_that_made_them(trials: GrammarTrials) -> None:
    trials.weigh(GOOD.grammar)  # type: ignore[arg-type]
    asked = trials.begin(Trial(LONG["patterns that multiply"]))
    fork, nice = fork_of(trials), os.getpriority(os.PRIO_PROCESS, 0)
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, fork) > nice, "its limits hold")
    os.kill(fork, signal.SIGSTOP)
    try:
        assert trials.pid is not None
        os.kill(trials.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(fork), "the fork has ended")
    finally:
        asked.cancel()
        with suppress(ProcessLookupError):
            os.kill(fork, signal.SIGKILL)


def put_another_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def start_stranger(text: bytes) -> Callable[..., tuple[subprocess.Popen[bytes], socket.socket]]:
    """Start a process that answers anything with `text`, in place of one that tries grammars."""
    answer = f"import os; os.read(0, 1 << 20); os.write(1, {text!r}); os.read(0, 1)"
    return lambda *_: start_helper((sys.executable, "-c", answer))


@pytest.mark.covers("F148")
@pytest.mark.parametrize(
    "text",
    [
        packed({"id": 1})[:4] + b"x" * 20,
        packed({"id": 1}),
        packed({"id": 1, "num_bytes": 1, "instead": ["no kind", "", ""]}),
        b"\0\0\0\x02[]",
        packed({"other": 1}),
    ],
)
def test_a_process_that_answers_something_else_costs_one_more_try(
    text: bytes, trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = iter([start_stranger(text), start_patient])
    monkeypatch.setattr(trials_module, "start_helper", lambda *asked: next(starts)(*asked))
    assert trials.begin(GOOD).result(WAIT_S).num_bytes > 0


@pytest.mark.covers("M07")
@pytest.mark.parametrize("change", [shutil.rmtree, put_another_tokenizer])
def test_a_folder_that_has_changed_since_the_start_changes_no_trial(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    trials = GrammarTrials(folder, "tiny", 320, {1}, ROUTER_LIMITS)
    change(folder)
    try:
        assert trials.begin(GOOD).result(WAIT_S).num_bytes > 0
    finally:
        trials.close()


@pytest.mark.covers("F148")
@pytest.mark.parametrize("error", [MemoryError(), OSError(11, "no process"), RuntimeError("?")])
def test_a_process_that_does_not_start_is_started_for_the_next_one(
    error: Exception, trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(trials_module, "start_helper", start)
    assert isinstance(trials.begin(GOOD).exception(WAIT_S), Overloaded)
    monkeypatch.setattr(trials_module, "start_helper", start_patient)
    assert trials.begin(GOOD).result(WAIT_S).num_bytes > 0


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.covers("F148")
def test_a_thread_that_does_not_start_is_started_for_the_next_one(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = num_open()
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        for _ in range(3):
            assert isinstance(trials.begin(GOOD).exception(WAIT_S), Overloaded)
    assert num_open() == before
    assert trials.begin(GOOD).result(WAIT_S).num_bytes > 0


def test_a_process_that_hangs_is_ended(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.weigh(GOOD.grammar)  # type: ignore[arg-type]
    first = trials.pid
    assert first is not None
    monkeypatch.setattr(trials_module, "MAX_SILENCE_S", 0.05)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(Overloaded, match="no grammar was compiled within"):
        trials.begin(GOOD).result(WAIT_S)
    wait_until(lambda: not is_alive(first), "it has ended")
    monkeypatch.undo()
    assert trials.weigh(GOOD.grammar) > 0  # type: ignore[arg-type]


def test_a_trial_that_gets_no_time_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_TRIAL_S", 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked = {"id": 1, "client": "", **trial_fields(Trial(Gbnf('root ::= "a"', "ebnf")))}
        ours.sendall(packed(asked))
        ours.shutdown(socket.SHUT_WR)
        server.TrialServer(theirs, None, ROUTER_LIMITS).serve()
        (reply,) = unpacked(bytearray(ours.recv(1 << 16)))
    with pytest.raises(Overloaded, match="was not compiled within 0 s"):
        verdict_of(reply)


def test_without_an_end_token_grammars_are_refused(folder: Path) -> None:
    trials = GrammarTrials(folder, "tiny", 320, (), ROUTER_LIMITS)
    grammar = Grammar(GrammarKind.REGEX, "a", "guided_regex")
    assert refusal(trials, grammar) == (
        "model 'tiny' has no end-of-sequence token, which grammars need"
    )
    trials.close()


def test_closing_ends_the_process_and_what_waits(trials: GrammarTrials) -> None:
    trials.weigh(GOOD.grammar)  # type: ignore[arg-type]
    pid = trials.pid
    assert pid is not None
    waiting = trials.begin(Trial(LONG["patterns that multiply"]))
    trials.close()
    for one in (waiting, trials.begin(GOOD)):
        assert isinstance(one.exception(WAIT_S), Overloaded)
    assert not is_alive(pid)


def test_a_trial_that_is_asked_for_while_all_is_closed_is_refused(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closing(Future[Any]):
        """Closes when the trial was asked for, and the lock is free."""

        def add_done_callback(self, fn: Callable[[Any], object]) -> None:
            super().add_done_callback(fn)
            trials.close()

    monkeypatch.setattr(trials_module, "Future", Closing)
    assert isinstance(trials.begin(GOOD).exception(WAIT_S), Overloaded)


def test_no_fork_handler_runs_at_its_start(folder: Path) -> None:
    """Those of gRPC end the child. A handler of this test's own counts, as a fork shows."""
    script = f"""
import ctypes, os
from pathlib import Path
from threading import Thread
from typing import Any
from grammars.trying.trials import GrammarTrials
from grammars.trying.trial import ROUTER_LIMITS, TrialLimits
from grammars.trying.messages import Trial
from common.grammar import Grammar, GrammarKind
count = 0
@ctypes.CFUNCTYPE(None)
def prepare():
    global count
    count += 1
ctypes.CDLL(None).__register_atfork(prepare, None, None, None)
trials = GrammarTrials(Path({str(folder)!r}), "tiny", 320, [1], ROUTER_LIMITS)
trials.weigh(Grammar(GrammarKind.REGEX, "a"))
trials.close()
print(count)
if os.fork() == 0:
    os._exit(0)
os.wait()
print(count)
"""
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert told.stdout.split() == ["0", "1"]
