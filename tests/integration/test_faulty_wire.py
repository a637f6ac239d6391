"""One fault on the wire between a prefill and a decode node: the right answer, or a typed error.

The decode node tells others that its KV endpoint is that of a proxy. Nothing is cached, so that a
prompt asked again without a fault is computed and handed over again, and says what is right.
"""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Answer, Api, ApiFailure
from tests.support.cluster.cluster import Cluster, ClusterSpec
from tests.support.cluster.topologies import relayed_spec
from tests.support.kv.fault_proxy import KINDS, Fault, FaultProxy
from tests.support.models.tiny_model import prompt_tokens

PROMPT_TOKENS = 400
NUM_DAMAGED = 16


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    with closing(FaultProxy(f"tcp://127.0.0.1:{free_loopback_port()}")) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def spec(
    tiny_model: Path, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> ClusterSpec:
    folder = tmp_path_factory.mktemp("at_start")
    return relayed_spec("faulty_wire", tiny_model, proxy, folder)


def hand_over(api: Api, proxy: FaultProxy, salts: Iterator[int]) -> int:
    """Ask until a prompt's KV passes the proxy, and return its bytes.

    After a handoff that failed, the router and the prefill node avoid the pair for a pause.
    """

    def num_passed() -> int:
        before = proxy.forwarded[0]
        ask(api, salt=next(salts))
        passed = proxy.forwarded[0] - before
        return passed if passed > PROMPT_TOKENS * 100 else 0

    return wait_until(num_passed, "KV passes the proxy", timeout_s=90.0)


def ask(api: Api, salt: int) -> Answer:
    prompt = prompt_tokens(PROMPT_TOKENS, salt=salt)
    return api.complete(prompt, max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)


def ask_until_fault(api: Api, proxy: FaultProxy, salts: Iterator[int]) -> tuple[int, Answer | int]:
    """Ask until the fault that is armed happens; return that prompt's salt, and its answer or
    the status of its error.

    A record in which the prefill node says that it does not reach the decode node may come late.
    Until the next one prompts are computed where they are decoded, and pass no proxy.
    """

    outcomes: list[tuple[int, Answer | int]] = []

    def has_happened() -> bool:
        salt = next(salts)
        try:
            outcomes.append((salt, ask(api, salt)))
        except ApiFailure as failure:
            outcomes.append((salt, failure.error.status))
        return proxy.num_faults > 0

    wait_until(has_happened, "the fault happens", timeout_s=90.0)
    return outcomes[-1]


@pytest.mark.covers("F19", "F23", "F24", "F28", "F90")
def test_the_answer_is_right_or_the_error_is_typed(
    cluster: Cluster, api: Api, proxy: FaultProxy
) -> None:
    """A fault of each kind, in a prompt of its own."""
    num_right = 0
    salts = count(1000)
    for kind in KINDS:
        num_bytes = hand_over(api, proxy, salts)
        rng = random.Random(f"{kind} between nodes")
        fault = Fault(kind=kind, at=rng.randrange(num_bytes // 2), mask=4, length=500)
        proxy.arm(fault)
        salt, answer = ask_until_fault(api, proxy, salts)
        assert proxy.num_faults == 1, fault
        if isinstance(answer, int):
            assert answer in (502, 503, 504), fault
        else:
            assert answer.tokens == ask(api, salt).tokens, fault
            num_right += 1
        cluster.check_settled()
    # What only broke a connection, or came late, was made good.
    assert num_right >= 4


def handoffs_failed(cluster: Cluster) -> float:
    text = urllib.request.urlopen(f"{cluster.url}/metrics", timeout=60).read().decode()
    (count,) = re.findall(r"^pdserve_router_handoffs_failed_total (\S+)$", text, re.MULTILINE)
    return float(count)


@pytest.mark.covers("F24")
def test_damaged_pieces_cost_no_attempt(cluster: Cluster, api: Api, proxy: FaultProxy) -> None:
    """One byte changed in each of many handoffs: the piece comes again, the attempt stays."""
    rng = random.Random("damage")
    salts = count(2000)
    num_bytes = hand_over(api, proxy, salts)
    num_before = handoffs_failed(cluster)
    for _ in range(NUM_DAMAGED):
        at = rng.randrange(num_bytes // 10, num_bytes * 9 // 10)
        proxy.arm(Fault(kind="corrupt", at=at, mask=1 << rng.randrange(8)))
        salt, answer = ask_until_fault(api, proxy, salts)
        assert proxy.num_faults == 1
        assert isinstance(answer, Answer)
        assert answer.tokens == ask(api, salt).tokens
    # A byte of ZMQ's own framing may be hit, which breaks the connection and no more.
    assert handoffs_failed(cluster) - num_before <= 1
    cluster.check_settled()
