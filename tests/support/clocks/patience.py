"""Roles for which a process that stands still for some seconds, as on a busy machine, is no news.

Otherwise a router has a silent node's prompts computed by another node too, and a node that waits
for another one's cached blocks computes them: the answers are the same, and their places are not.
"""

from __future__ import annotations

PATIENT = "PATIENT"
"""The variable, with any value."""
TICK_S = 1.0
"""Four times as long as elsewhere: a silent node is suspected after 5 s, and lost after 20 s."""
PULL_S = 60.0


def wait_for_nodes() -> None:
    """This router suspects and gives up nodes later."""
    from router.dispatch import node_pool

    node_pool.TICK_S = TICK_S  # type: ignore[attr-defined]


def wait_for_pulls() -> None:
    """Whatever this node pulls it waits for: to compute it seems to take a minute."""
    from engine.core.runner_contract import StepCosts
    from engine.runner import model_runner
    from node.flow.pulls import prefix_pulls

    costs = StepCosts((1, 65), (PULL_S, PULL_S + 1.0))
    prefix_pulls.LEAST_PATIENCE_S = PULL_S
    model_runner.measure_step_costs = lambda *_, **__: costs
