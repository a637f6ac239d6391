"""Conversations on a cluster of real processes: where their turns go."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from common.nodes import Role
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.api import Api
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.models.tiny_model import prompt_tokens

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def spec(tiny_model: Path) -> ClusterSpec:
    """Two nodes of each role, which take turns; a second router goes by what they hold."""
    local = ("--local-prefill-threshold", "0")
    return ClusterSpec(
        name="sessions",
        model=tiny_model,
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("prefill-2", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE, local),
            NodeSpec("decode-2", Role.DECODE, local),
        ),
        flags=SMALL_NODES,
        routers=(
            ("--placement-policy", "round_robin", "--log-format", "json"),
            ("--placement-policy", "prefix_affinity", "--log-format", "json"),
        ),
        has_patient_routers=True,
    )


class Conversation:
    """Turns that each begin with all that was said before, as a chat's do."""

    number = 0

    def __init__(self, cluster: Cluster, headers: dict[str, str], **fields: str) -> None:
        type(self).number += 1
        self._cluster, self._headers, self._fields = cluster, headers, fields
        self._said = prompt_tokens(70, salt=200 + self.number)
        self.num_cached = 0

    def turn(self, router: int = 1, max_tokens: int = 3) -> set[str]:
        """The nodes that served one more turn, by a router."""
        self.__class__.number += 1
        request_id = f"turn-{self.number}"
        body = {"model": "tiny", "prompt": self._said, "max_tokens": max_tokens, "temperature": 0}
        with Api(self._cluster.urls[router - 1], "tiny") as api:
            headers = self._headers | {"x-request-id": request_id}
            reply = api.http.post(COMPLETIONS, json=body | self._fields, headers=headers)
        assert reply.status_code == 200, reply.text
        self.num_cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        self._said = self._said + prompt_tokens(20, salt=300 + self.number)
        return served_by(self._cluster, f"router-{router}", request_id)


def served_by(cluster: Cluster, name: str, request_id: str) -> set[str]:
    """The nodes that the router's log names for a request."""
    router = cluster.processes[name]

    def nodes() -> set[str]:
        lines = [json.loads(text) for text in router.log().split("\n")[:-1] if request_id in text]
        return {
            node for line in lines if line.get("request_id") == request_id for node in line["nodes"]
        }

    return wait_until(nodes, f"{request_id} is logged")


def test_the_turns_of_a_conversation_stay_together_by_every_name(cluster: Cluster) -> None:
    conversations = [
        Conversation(cluster, {"x-session-id": "one"}),
        Conversation(cluster, {"x-dynamo-session-id": "two"}),
        Conversation(cluster, {}, prompt_cache_key="three"),
        Conversation(cluster, {}, user="four"),
    ]
    first = [one.turn() for one in conversations]
    assert all(len(nodes) == 2 for nodes in first)
    assert first[0] == first[2] != first[1] == first[3], "they took turns"
    for _ in range(2):
        # An odd number of others, so that without a session it would be the other nodes' turn.
        Conversation(cluster, {}).turn()
        assert [one.turn() for one in conversations] == first
        assert all(one.num_cached >= 64 for one in conversations)


def known_blocks(cluster: Cluster, router: int) -> float:
    """The blocks that the nodes have reported to a router."""
    text = httpx.get(f"{cluster.urls[router - 1]}/metrics", timeout=30.0).text
    return float(re.findall(r"^pdserve_router_known_blocks (\S+)$", text, re.MULTILINE)[0])


def wait_known(cluster: Cluster, router: int, number: float) -> None:
    """Return when so many blocks are known to a router."""
    wait_until(lambda: known_blocks(cluster, router) >= number, f"{number:g} blocks are reported")


def test_a_router_knows_what_nodes_hold_of_requests_that_another_one_sent(
    cluster: Cluster,
) -> None:
    """Whichever nodes they are: the second router saw none of the turns before.

    With one token the prefill node alone has blocks, so they are reported when they are known.
    """
    conversations = [Conversation(cluster, {}) for _ in range(3)]
    for one in conversations:
        before = known_blocks(cluster, 2)
        nodes = one.turn(max_tokens=1)
        wait_known(cluster, 2, before + 4)
        cluster.wait_seen_idle()
        assert one.turn(router=2, max_tokens=1) == nodes
        assert one.num_cached >= 64


def test_a_router_that_starts_is_told_what_nodes_hold(cluster: Cluster) -> None:
    conversation = Conversation(cluster, {})
    nodes = conversation.turn()
    assert cluster.processes["router-2"].interrupt() == 0
    cluster.mend()  # a node is chosen from its first report on
    cluster.wait_seen_idle()
    assert known_blocks(cluster, 2) >= 4
    assert conversation.turn(router=2) == nodes


def test_a_conversation_leaves_a_node_that_is_drained_and_one_that_is_killed(
    cluster: Cluster,
) -> None:
    conversation = Conversation(cluster, {"x-session-id": "moves"})
    first = conversation.turn()
    (drained,) = [node for node in first if node.startswith("decode")]
    with Api(cluster.url, "tiny") as api:
        assert api.http.post("/v1/cluster/drain", json={"node_id": drained}).status_code == 200
    wait_until(lambda: drained not in cluster.chosen_nodes(cluster.url), f"{drained} has left")
    second = conversation.turn()
    assert drained not in second
    assert first - {drained} < second
    (killed,) = [node for node in second if node.startswith("prefill")]
    cluster.processes[killed].kill()
    wait_until(lambda: killed not in cluster.chosen_nodes(cluster.url), f"{killed} is missed")
    third = conversation.turn()
    assert killed not in third
    assert second - {killed} < third
    assert cluster.processes[drained].wait(60.0) == 0
    cluster.mend()
    Conversation(cluster, {}).turn()
    assert conversation.turn() == third
