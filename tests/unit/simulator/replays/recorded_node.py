"""A node's flow that is asked and recorded, without a runner: tokens are drawn here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import cast

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from common.nodes import Role
from common.request import GenerationRequest
from common.settings.config import Config, EngineConfig
from common.settings.scheduling_config import SchedulingConfig
from engine.core.runner_contract import DrawnTokens, RunnerResult, StepCosts
from engine.core.step.step_in_flight import PlannedStep
from node.flow.messages import AbortAttempt, Submit
from node.flow.node_flow import NodeFlow
from node.life.make_flow import flow_maker
from node.life.make_scheduler import make_scheduler
from node.life.node_parts import LoadedModel, NodeConnector
from node.life.step_recording import StepRecording, record_steps
from tests.support.engine.build import make_request

ME, ROUTER = Incarnation("decode-1", 3), Incarnation("router-1", 1)
BLOCK_SIZE, VOCAB_SIZE, EOS = 4, 100, 99


class Model:
    """The facts that a flow and its recording ask for."""

    layout = KVLayout(
        model_digest="m" * 32,
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        block_size=BLOCK_SIZE,
        dtype="float32",
    )
    num_host_blocks = 0
    max_model_len = 200
    eos_token_ids = frozenset((EOS,))
    pairs_per_token = 16
    step_costs = StepCosts((1, 65), (0.01, 0.1))
    needs_staging = stages_landings = has_grammars = False
    vocab_size = VOCAB_SIZE

    def __init__(self, num_blocks: int, *, can_go_on: bool) -> None:
        self.num_blocks, self.can_go_on = num_blocks, can_go_on


class Connector:
    endpoint = "127.0.0.1:1"


class RecordedNode:
    """Computes prompts itself. Every token follows from `seed`.

    With `is_ahead` steps are planned ahead, and some begin before the one before has ended.
    """

    def __init__(
        self, folder: Path | None, seed: int, *, num_blocks: int = 60, is_ahead: bool = False
    ) -> None:
        config = Config(
            role=Role.DECODE,
            engine=EngineConfig(max_num_seqs=8, max_num_batched_tokens=32, block_size=BLOCK_SIZE),
            scheduling=SchedulingConfig(
                reservation_policy="none", async_scheduling="on" if is_ahead else "off"
            ),
        )
        model = cast(LoadedModel, Model(num_blocks, can_go_on=is_ahead))
        connector = cast(NodeConnector, Connector())
        self.recording: StepRecording | None = None
        tokens = count(1)
        new_lease_token = lambda: next(tokens)  # noqa: E731
        if folder is not None:
            self.recording = record_steps(folder, config, model, ME, connector)
            new_lease_token = self.recording.drawing(new_lease_token)
        scheduler = make_scheduler(config, model)
        self.flow: NodeFlow = flow_maker(config)(scheduler, model, ME, connector, new_lease_token)
        if self.recording is not None:
            self.flow = self.recording.of_flow(self.flow)
        self._is_ahead = is_ahead
        self._draws = Random(seed)
        self.now_s = 0.0

    def requests(self, number: int) -> Iterator[GenerationRequest]:
        """Requests of few beginnings; some go on where another answer may have ended."""
        draw = self._draws
        for name in range(number):
            beginning = tuple(1 + draw.randrange(3) for _ in range(2 * BLOCK_SIZE))
            rest = tuple(draw.randrange(VOCAB_SIZE - 1) for _ in range(draw.randrange(1, 20)))
            yield make_request(
                beginning[: BLOCK_SIZE * draw.randrange(3)] + rest,
                name=f"r{name}",
                max_tokens=1 + draw.randrange(40),
                deadline_s=5.0 + draw.randrange(40),
            )

    def run(self, number: int) -> None:
        """Ask for so many answers, abort some, and step until all have ended."""
        asked = list(self.requests(number))
        while asked or not self.flow.is_empty:
            for _ in range(self._draws.randrange(3)):
                if asked:
                    self.ask(asked.pop())
            if not self._draws.randrange(12):
                gone = AttemptId(f"r{self._draws.randrange(number)}", 1)
                self.flow.on_message(AbortAttempt(ROUTER, (gone,)), self.now_s)
            self.turn()
        self.flow.on_stop()
        if self.recording is not None:
            self.recording.close()

    def ask(self, request: GenerationRequest) -> None:
        """Ask for one answer, whose prompt is computed here."""
        submit = Submit(
            request=request,
            router=ROUTER,
            reply_to=1,
            received_at_s=self.now_s,
            must_prefill_locally=True,
            may_wait=True,
        )
        self.flow.on_message(submit, self.now_s)

    def turn(self) -> None:
        """One step."""
        self.now_s += 0.05
        self.flow.on_time(self.now_s)
        step, _ = self.flow.begin_step(self.now_s)
        if step.batch:
            self.flow.pushes(step)
            if self._is_ahead:
                is_offered = step.batch.going_on is not None
                step.batch.has_gone_on = is_offered and bool(self._draws.randrange(3))
                self.flow.plan_ahead(step)
            step.took_s = 0.01 * len(step.batch)
            self.flow.end_step(step, self._results(step), self.now_s)
        self.flow.report()

    def _results(self, step: PlannedStep) -> RunnerResult:
        """Few different tokens: answers that begin alike often go on alike."""
        left_behind = []
        if step.batch.has_gone_on:
            left_behind = [e for e in range(len(step.batch)) if not self._draws.randrange(6)]
        drawn = (
            DrawnTokens((EOS if not self._draws.randrange(25) else self._draws.randrange(3),))
            if draws
            else None
            for draws in step.batch.is_sampled.tolist()
        )
        return RunnerResult(drawn, left_behind=left_behind)
