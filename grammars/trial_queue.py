"""Which grammars are tried at a time: every client has its turn, and long trials make room.

A trial that has run for `YOUNG_S` is old. Old ones fill all slots but one, or all while nobody
waits. Where one waits and all slots are with old ones, one of these is stopped: it is tried again
from its beginning behind those that were never tried. No I/O: times are passed in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from common.errors import Overloaded

MAX_SLOTS = 3
"""Trials that run at a time, each in a process of its own."""
YOUNG_S = 0.1
MAX_WAITING = 256
"""Trials that wait for a slot."""
MAX_STOPS = 3
"""A trial that made room so often is given up."""


@dataclass(slots=True)
class _Running:
    client: str
    began_s: float


@dataclass(slots=True)
class TrialQueue:
    """The order of trials, which are known by their ids."""

    _new: OrderedDict[str, deque[int]] = field(default_factory=OrderedDict)
    _stopped: deque[int] = field(default_factory=deque)
    _clients: dict[int, str] = field(default_factory=dict)
    _running: dict[int, _Running] = field(default_factory=dict)
    _num_stops: dict[int, int] = field(default_factory=dict)

    def add(self, trial: int, client: str) -> None:
        """Queue a trial. Raises `Overloaded` where too many wait."""
        if len(self._clients) - len(self._running) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} grammars wait to be compiled: send the request again")
        self._clients[trial] = client
        self._new.setdefault(client, deque()).append(trial)

    def remove(self, trial: int) -> None:
        """Forget a trial that has ended, or that nobody waits for. Idempotent."""
        client = self._clients.pop(trial, None)
        if client is None:
            return
        self._num_stops.pop(trial, None)
        if self._running.pop(trial, None) is not None:
            return
        if trial in self._stopped:
            self._stopped.remove(trial)
            return
        self._new[client].remove(trial)
        if not self._new[client]:
            del self._new[client]

    def next_to_start(self, now_s: float) -> int | None:
        """Return the trial that starts now, if one may; it counts as running."""
        if len(self._running) >= MAX_SLOTS:
            return None
        if self._new:
            client = next(iter(self._new))
            trial = self._new[client].popleft()
            if self._new[client]:
                self._new.move_to_end(client)
            else:
                del self._new[client]
        elif self._stopped and len(self._running) < MAX_SLOTS - 1:
            trial = self._stopped.popleft()
        else:
            return None
        self._running[trial] = _Running(self._clients[trial], now_s)
        return trial

    def next_to_stop(self, now_s: float) -> int | None:
        """Return a running trial that must make room now, if one must; it waits again.

        It is one of the client that has most of them, and of these the one that began last.
        """
        if not self._new or len(self._running) < MAX_SLOTS:
            return None
        if any(now_s - one.began_s < YOUNG_S for one in self._running.values()):
            return None
        held = [one.client for one in self._running.values()]
        trial = max(
            self._running,
            key=lambda one: (held.count(self._running[one].client), self._running[one].began_s),
        )
        del self._running[trial]
        self._stopped.append(trial)
        self._num_stops[trial] = self._num_stops.get(trial, 0) + 1
        return trial

    def is_given_up(self, trial: int) -> bool:
        """Return whether a trial made room too often to be tried again."""
        return self._num_stops.get(trial, 0) >= MAX_STOPS

    def wait_s(self, now_s: float) -> float | None:
        """Return after how long `next_to_stop` may name a trial; None: not by time alone."""
        if not self._new or len(self._running) < MAX_SLOTS:
            return None
        youngest_s = max(one.began_s for one in self._running.values())
        return max(0.0, youngest_s + YOUNG_S - now_s)
