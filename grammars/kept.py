"""Compiled grammars that are kept, bounded by what they weigh."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from threading import RLock

from llguidance import LLMatcher

from common.errors import Overloaded
from common.grammar import Grammar

MAX_KEPT_BYTES = 192 << 20
"""Memory of all compiled grammars of a process: those of requests in progress and the last used."""
FOLLOWED_BYTES = 1 << 10
"""Growth of a grammar with a token that is drawn under it without a mask: states of its lexer are
found as they are needed, and shared by all requests that follow it."""
USUAL_GROWTH_BYTES = 2 << 20
"""Growth up to this ends no request: it is not what the bound is for."""
MAX_GROWTH_BYTES = 50 << 20
"""Memory of all states that the lexer of a grammar may have, at 1 kB each."""


@dataclass(slots=True)
class _Kept:
    key: Grammar
    matcher: LLMatcher
    num_bytes: int
    num_growth_bytes: int = 0
    num_holders: int = 0
    is_listed: bool = True
    is_stale: bool = False

    @property
    def weight(self) -> int:
        return self.num_bytes + self.num_growth_bytes


class KeptGrammars:
    """Compiled grammars by their texts. Threads may share it."""

    def __init__(self) -> None:
        # Reentrant: a holder may end, by the garbage collector, within any of the methods.
        self._lock = RLock()
        self._listed: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def num_bytes(self) -> int:
        """What all of them weigh, also those that were forgotten and are still held."""
        return self._num_bytes

    def get(self, grammar: Grammar, *, is_held: bool = False) -> LLMatcher | None:
        """Return the matcher, not to be consumed by; it counts as used.

        A forgotten one is returned to those alone who hold it.
        """
        with self._lock:
            found = self._listed.get(grammar)
            if found is None or (found.is_stale and not is_held):
                return None
            self._listed.move_to_end(grammar)
            return found.matcher

    def bytes_of(self, grammar: Grammar) -> int:
        """Return what a kept grammar weighs."""
        with self._lock:
            return self._listed[grammar].weight

    def keep(self, grammar: Grammar, matcher: LLMatcher, num_bytes: int) -> None:
        """Keep a matcher of `num_bytes`; those that nobody holds make room, the last used last.

        Raises `Overloaded` where the others are all held.
        """
        num_bytes = max(num_bytes, len(grammar.text))
        with self._lock:
            self._unlist(grammar)
            self._make_room(num_bytes)
            if self._num_bytes + num_bytes > MAX_KEPT_BYTES:
                raise Overloaded(
                    f"the grammars of requests in progress take {self._num_bytes >> 20} MiB of "
                    f"{MAX_KEPT_BYTES >> 20}: no room for one of {num_bytes >> 20} MiB more"
                )
            # A copy: the key is no request's, so it holds nothing.
            key = replace(grammar, source="")
            self._listed[key] = _Kept(key, matcher, num_bytes)
            self._num_bytes += num_bytes

    def hold(self, grammar: Grammar) -> bool:
        """Keep the compiled grammar as long as this object lives; False: it is not kept."""
        with self._lock:
            found = self._listed.get(grammar)
            if found is None or found.is_stale:
                return False
            self._listed.move_to_end(grammar)
            found.num_holders += 1
            weakref.finalize(grammar, self._release, found).atexit = False
            return True

    def count_followed(self, grammar: Grammar, num_tokens: int) -> None:
        """Add to the weight of a grammar that so many more tokens were drawn under it."""
        with self._lock:
            self._add(grammar, num_tokens * FOLLOWED_BYTES)

    def grow(self, grammar: Grammar, num_bytes: int) -> None:
        """Add to the weight of a grammar what it grew by with a mask; others make room.

        Raises `Overloaded` where the others are all held, once it has grown beyond what is usual.
        """
        with self._lock:
            self._add(grammar, num_bytes)
            self._make_room(0)
            found = self._listed.get(grammar)
            has_grown = found is not None and found.num_growth_bytes > USUAL_GROWTH_BYTES
            if has_grown and self._num_bytes > MAX_KEPT_BYTES:
                raise Overloaded(
                    f"the grammars of requests in progress take more than "
                    f"{MAX_KEPT_BYTES >> 20} MiB, and this one grows"
                )

    def forget(self, grammar: Grammar) -> None:
        """Drop a compiled grammar: the next request compiles it again, running ones keep theirs."""
        with self._lock:
            found = self._listed.get(grammar)
            if found is not None and found.num_holders:
                found.is_stale = True
            else:
                self._unlist(grammar)

    def _add(self, grammar: Grammar, num_bytes: int) -> None:
        found = self._listed.get(grammar)
        if found is not None:
            more = min(num_bytes, MAX_GROWTH_BYTES - found.num_growth_bytes)
            found.num_growth_bytes += more
            self._num_bytes += more

    def _unlist(self, grammar: Grammar) -> None:
        found = self._listed.pop(grammar, None)
        if found is not None:
            found.is_listed = False
            self._drop_unused(found)

    def _make_room(self, num_bytes: int) -> None:
        for grammar in [one for one, kept in self._listed.items() if not kept.num_holders]:
            if self._num_bytes + num_bytes <= MAX_KEPT_BYTES:
                return
            self._unlist(grammar)

    def _release(self, kept: _Kept) -> None:
        with self._lock:
            kept.num_holders -= 1
            if kept.is_stale and kept.is_listed and not kept.num_holders:
                self._unlist(kept.key)
            else:
                self._drop_unused(kept)

    def _drop_unused(self, kept: _Kept) -> None:
        if not kept.is_listed and not kept.num_holders:
            self._num_bytes -= kept.weight
