"""Which grammars are tried at a time: every client has its turn, and long trials make room.

A client has all slots but one. A trial that has computed for long is old. Where one of another
client waits that has fewer slots, or where all slots that a client may have are with old ones, an
old one is stopped: it is tried again from its beginning, behind those that were never tried, and
leaves the last slot to them. No I/O and no clock: its caller says which trials are old.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from common.errors import Overloaded

MAX_SLOTS = 3
"""Trials that run at a time, each in a process of its own."""
MAX_SLOTS_OF_A_CLIENT = 2
"""The last slot is free for the next client, who would wait until one of the others is old."""
MAX_WAITING = 256
"""Trials that wait for a slot."""
MAX_STOPS = 3
"""A trial that made room so often is given up."""


@dataclass(slots=True)
class _Running:
    client: str
    is_old: bool = False


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

    def next_to_start(self) -> int | None:
        """Return the trial that starts now, if one may; it counts as running."""
        if len(self._running) >= MAX_SLOTS:
            return None
        if self._new:
            client = self._next_client()
            if self._num_running(client) >= MAX_SLOTS_OF_A_CLIENT:
                return None
            trial = self._new[client].popleft()
            if self._new[client]:
                self._new.move_to_end(client)
            else:
                del self._new[client]
        elif self._stopped and len(self._running) < MAX_SLOTS - 1:
            trial = self._stopped.popleft()
        else:
            return None
        self._running[trial] = _Running(self._clients[trial])
        return trial

    def age(self, trial: int) -> None:
        """Note that a running trial is old."""
        self._running[trial].is_old = True

    def next_to_stop(self) -> int | None:
        """Return a running trial that must make room now, if one must; it waits again.

        It is one of the client that has most of them, and of these the one that began last.
        """
        if not self._new:
            return None
        client = self._next_client()
        # The order of what runs is that in which it began.
        old = [trial for trial, one in reversed(self._running.items()) if one.is_old]
        if (num_own := self._num_running(client)) >= MAX_SLOTS_OF_A_CLIENT:
            old = [trial for trial in old if self._running[trial].client == client]
            must_stop = len(old) == num_own
        elif old and len(self._running) >= MAX_SLOTS:
            old.sort(key=lambda one: -self._num_running(self._running[one].client))
            most = self._num_running(self._running[old[0]].client)
            must_stop = len(old) == MAX_SLOTS or most > num_own
        else:
            must_stop = False
        if not must_stop:
            return None
        trial = old[0]
        del self._running[trial]
        self._stopped.append(trial)
        self._num_stops[trial] = self._num_stops.get(trial, 0) + 1
        return trial

    def _next_client(self) -> str:
        """Return who is next of those that wait: the one with the fewest slots, by turns."""
        return min(self._new, key=self._num_running)

    def _num_running(self, client: str) -> int:
        return sum(one.client == client for one in self._running.values())

    def is_given_up(self, trial: int) -> bool:
        """Return whether a trial made room too often to be tried again."""
        return self._num_stops.get(trial, 0) >= MAX_STOPS
