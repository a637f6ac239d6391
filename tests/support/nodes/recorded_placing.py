"""The placement of a router that is asked and recorded, without nodes and requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from common.errors import Overloaded
from common.ids import Incarnation
from common.nodes import Role
from placement.store import LiveNode
from router.core.effects import Choose
from router.core.known.block_reports import BlockReport
from router.core.known.node_view import NodeView
from router.core.placement import Placing
from router.core.policies.query import Query
from router.dispatch.placing_recording import PlacingRecording
from tests.support.nodes.node_views import node

ROUTER_ID = "router-1"


class RecordedPlacing:
    """A router of nodes of three kinds. All that happens is the same every time."""

    def __init__(self, folder: Path, placing: Placing, num_nodes: int) -> None:
        self._recording = PlacingRecording(folder, ROUTER_ID, placing)
        self.membership, self.chooser = self._recording.machines()
        self.path = folder / f"{ROUTER_ID}.jsonl"
        self._draws, self._now_s = Random(0), 0.0
        self._views = [self._view(number) for number in range(num_nodes)]
        self._nodes = [view.incarnation for view in self._views]
        self._running: list[tuple[Incarnation | None, Incarnation | None, int]] = []

    def _view(self, number: int) -> NodeView:
        role = (Role.PREFILL, Role.DECODE, Role.MIXED)[number % 3]
        view = node(f"n{number:03}", role, max_model_len=900 + 100 * (number % 3))
        record = replace(view.record, model="tiny")
        return replace(view, record=record)

    def run(self, num_events: int) -> None:
        """Let so many things happen, and end the recording."""
        self._list()
        for one in self._nodes:
            self.membership.on_heard(one)
        for _ in range(num_events):
            self._now_s += self._draws.random() / 10
            self._event()
        self._recording.close()

    def _event(self) -> None:
        draw, at = self._draws, self._draws.choice(self._nodes)
        match draw.randrange(12):
            case 0:
                self._list()
            case 1:
                self.membership.on_suspected(at, "it is silent", is_heard=bool(draw.randrange(2)))
            case 2:
                self.membership.on_lost(at, "its stream broke")
                self.chooser.on_lost(at)
            case 3:
                for one in self._nodes:
                    self.membership.on_heard(one)
            case 4:
                pair = at, draw.choice(self._nodes)
                self.chooser.on_failed(pair, self._now_s)
            case 5:
                self._report(at)
            case 6 if self._running:
                self._end(draw.randrange(len(self._running)))
            case _:
                self._place()

    def _list(self) -> None:
        self.membership.on_asking()
        listing = [
            LiveNode(
                record=view.record,
                load=replace(view.load, free_blocks=self._draws.randrange(100)),
            )
            for view in self._views
            if self._draws.randrange(20)
        ]
        self.membership.on_listing(listing, self._now_s)
        while self.membership.has_unread:
            self.membership.nodes()

    def _query(self) -> Query:
        draw = self._draws
        beginning = [draw.randrange(4)] * 32
        prompt = (*beginning, *(draw.randrange(1000) for _ in range(draw.randrange(1, 60))))
        session = b"%16d" % draw.randrange(9) if draw.randrange(2) else b""
        return Query(prompt, 1 + draw.randrange(30), session=session)

    def _report(self, at: Incarnation) -> None:
        record = next(view.record for view in self._views if view.incarnation == at)
        keys = self._query().block_keys(record)
        self.chooser.on_blocks(at, BlockReport(bool(self._draws.randrange(2)), added=keys))

    def _place(self) -> None:
        query, nodes = self._query(), self.membership.nodes()
        wanted = Choose(None, frozenset(self._draws.sample(self._nodes, 2)))
        try:
            chosen, _ = self.chooser.choose(nodes, query, wanted, self._now_s)
        except Overloaded:
            return
        num_tokens = len(query.prompt_token_ids)
        if chosen.decode is not None:
            self.membership.on_leg_opened(chosen.decode, 0 if chosen.prefill else num_tokens)
        if chosen.prefill is not None:
            self.membership.on_leg_opened(chosen.prefill, num_tokens)
        self._running.append((chosen.decode, chosen.prefill, num_tokens))

    def _end(self, index: int) -> None:
        decode, prefill, num_tokens = self._running.pop(index)
        if decode is not None:
            if prefill is None:
                self.membership.on_prompt_computed(decode, num_tokens)
            self.membership.on_leg_closed(decode, 0)
        if prefill is not None:
            self.membership.on_leg_closed(prefill, num_tokens)
