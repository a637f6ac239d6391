"""Bugs in what nodes refuse, hold and share, each a piece of its source and what stands there."""

from __future__ import annotations

from tests.simulation.bugs_to_plant import Bug

LOAD = [
    Bug(
        "no full node is asked to queue a request",
        "router.core.candidates",
        "        if not self._full:\n            return False\n",
        "        if self._full or not self._full:\n            return False\n",
    ),
    Bug(
        "the client is told the longest of the times after which to come again",
        "router.core.candidates",
        "min(error.retry_after_s, known_s)",
        "max(error.retry_after_s, self._retry_after_s.get(node, 0.0))",
    ),
    Bug(
        "requests that wait for a pull do not count as waiting",
        "node.flow.attempts.attempt_queue",
        "        return len(self._held)\n",
        "        return len(self._compiling)\n",
    ),
    Bug(
        "a request is shed that finds no queue",
        "node.flow.attempts.shedding",
        "        if not waiting or request.output_token_ids:\n",
        "        if request.output_token_ids:\n",
    ),
    Bug(
        "a node without room refuses what may wait too",
        "node.flow.decode",
        "not sequence.has_remote_kv or message.may_wait or self",
        "not sequence.has_remote_kv or self",
    ),
    Bug(
        "a request whose handoff failed does not wait where no node stays",
        "router.core.candidates",
        "        if self._has_none_staying:\n            is_lost",
        "        if False:\n            is_lost",
    ),
]

POOLS = [
    Bug(
        "a request is asked of nodes that are too small for it",
        "router.core.placement",
        "    fitting = [node for node in staying if query.fits(node.record)]\n",
        "    fitting = list(staying)\n",
    ),
    Bug(
        "a request that only full nodes hold is refused as too long",
        "router.core.candidates",
        "            if self.failure is None and self._last_refusal:",
        "            if self.failure is not None and self._last_refusal:",
    ),
    Bug(
        "an answer is cut to one token less than nodes hold",
        "router.core.flow_actions",
        "        num_left, main = longest - len(self._prompt.token_ids), self._main.ledger\n",
        "        num_left, main = longest - len(self._prompt.token_ids) - 1, self._main.ledger\n",
    ),
]

SALTS = [
    Bug(
        "prompts are found whatever their salts are",
        "engine.core.sequences.prefix_index",
        "            root, prompt = self._root(sequence.request.cache_salt), ",
        '            root, prompt = self._root(""), ',
    ),
    Bug(
        "a node is not told the salt of a request",
        "router.core.flow_actions",
        "            cache_salt=self._cache_salt,\n",
        '            cache_salt="",\n',
    ),
    Bug(
        "a node is not told the salt of an answer that goes on",
        "router.core.flow_actions",
        "            cache_salt=self._cache_salt,\n",
        '            cache_salt="" if attempt.ledger.emitted else self._cache_salt,\n',
    ),
]

GRAMMARS = [
    Bug(
        "a request goes on whose grammar cannot be followed",
        "node.flow.node_flow",
        "        error = message.error or self.reservations",
        "        error = self.reservations",
    ),
    Bug(
        "a request whose grammar is compiled is not queued",
        "node.flow.node_flow",
        "        self._queue.on_compiled(attempt)\n",
        "        pass\n",
    ),
    Bug(
        "a request ends where one node has no room for its grammar",
        "router.core.request_flow",
        "        if isinstance(error, (Draining, Overloaded, PoolExhausted)):\n",
        "        if isinstance(error, (Draining, PoolExhausted)):\n",
    ),
]

SCHEDULING = [
    Bug(
        "what running sequences may need is kept back where none runs",
        "engine.core.planning.admission_plan",
        "        if not self.seated:\n            return None\n        reserved",
        "        reserved",
    ),
    Bug(
        "a request is passed once more than others may pass it",
        "engine.core.planning.admission_plan",
        "        return sequence.num_bypassed + len(passing) >= limit\n",
        "        return sequence.num_bypassed + len(passing) > limit\n",
    ),
]

DEMAND = [*LOAD, *POOLS, *SALTS, *GRAMMARS, *SCHEDULING]
