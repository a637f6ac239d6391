"""What many requests on many nodes cost a simulation: `bench.plan` runs it, with `--many`.

Short requests (512 prompt tokens, 64 output tokens, none alike) come at random times to 500 prefill
and 500 decode nodes. None of them is kept, so what the simulation holds grows only as the caches of
the nodes fill.

many_requests     how many were served
many_setup_s      CPU seconds to make the nodes
many_request_ms   CPU milliseconds of a request, of the second half of them; that every node is
                  looked at in the end comes once, and is not in it
million_s         CPU seconds of a million: measured, or with as many milliseconds for each further
memory_growth     memory after the last request / after the first half of them
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from bench.router.processes import rss_bytes
from common.nodes import Role
from common.settings.config import Config
from simulator.clients import ClientRequest
from simulator.cluster import ClusterSetup, SimulatedCluster
from simulator.profile import read_profile
from simulator.served import ServedRequest
from simulator.trace_file import TraceRequest

MILLION = 1_000_000
NUM_NODES = 1000
RATE = 2000.0
"""Requests a second: a decode node has two answers at a time, as many as it would have busy."""
NUM_PROMPT, NUM_OUTPUT = 512, 64


def requests(number: int, seed: int) -> Iterator[ClientRequest]:
    """Yield requests as they come."""
    rng, at_s = random.Random(seed), 0.0
    for index in range(number):
        at_s += rng.expovariate(RATE)
        yield ClientRequest(TraceRequest(at_s, NUM_PROMPT, NUM_OUTPUT), index, NUM_OUTPUT, 0)


def serve_many(profile: Path, number: int, num_nodes: int, seed: int) -> dict[str, float]:
    """Serve `number` requests; return the figures. Raises `ConfigError` for a profile."""
    began_s = time.process_time()
    nodes = {Role.PREFILL: num_nodes // 2, Role.DECODE: num_nodes - num_nodes // 2}
    cluster = SimulatedCluster(
        ClusterSetup(
            profile=read_profile(profile),
            num_nodes=nodes,
            config=Config(role=Role.DECODE),
            seed=seed,
        )
    )
    setup_s = time.process_time() - began_s
    half = _Half(number // 2)
    cluster.serve_each(requests(number, seed), half.on_served)
    now_s = time.process_time()
    request_s = (half.last_at_s - half.at_s) / (number - half.number)
    return {
        "many_requests": number,
        "many_setup_s": round(setup_s, 2),
        "many_request_ms": round(1e3 * request_s, 3),
        "million_s": round(now_s - began_s + request_s * max(0, MILLION - number), 1),
        "memory_growth": round(rss_bytes(os.getpid()) / half.rss_bytes, 3),
    }


class _Half:
    """Looks at the clock and the memory when so many requests have ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._num_ended = self.rss_bytes = 0
        self.at_s = self.last_at_s = 0.0
        """CPU time when the half had ended, and when the latest request had."""

    def on_served(self, served: ServedRequest) -> None:
        self._num_ended += 1
        self.last_at_s = time.process_time()
        if self._num_ended == self.number:
            self.at_s, self.rss_bytes = self.last_at_s, rss_bytes(os.getpid())
