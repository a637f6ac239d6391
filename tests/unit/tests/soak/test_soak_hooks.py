"""What a soak changes in its nodes when they start fits the nodes of today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.soak.cluster import AT_START, CONTROL, KV, PULL_ALL

NODE = """
from engine.core.scheduler import Scheduler
from kv_transfer.zmq.transport import ZmqTransport
from node.flow.pulls.pull_cost import PullCost
from node.life import self_description

cost = PullCost(1.0, lambda num_tokens: 0.0)
print(cost.is_worth(1), cost.is_worth(1, 2, num_read=3, num_at_source=4))
print(ZmqTransport.endpoint.fget(None), Scheduler.apply.__name__)
print(self_description.node_records.__name__)
"""


def test_a_node_of_a_soak_tells_its_links_checks_its_books_and_pulls_all(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_START)
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[4])))
    environ = {CONTROL: "links:1", KV: "tcp://links:2", PULL_ALL: "1", "PYTHONPATH": path}
    told = subprocess.run(
        [sys.executable, "-c", NODE], env=environ, capture_output=True, text=True, check=True
    )
    assert told.stderr == ""
    assert told.stdout.splitlines() == [
        "True True", "tcp://links:2 apply_and_check", "records_of_the_link",
    ]  # fmt: skip
