"""How a node's memory is divided, by role and drafts: `python -m bench.engine.memory_plan`.

Loads the demo model once for each row, in a process of its own, as a node does that has `--memory`
and the default number of seats and tokens of a step. Drafts come from the mtp head.

    tokens       tokens of the largest step, `get_max_chunk_tokens`
    buffers_mib  step buffers, allocated for that many tokens
    peak_mib     what the process takes without a KV cache while it computes that step, measured
    kv_blocks    KV blocks of 64 tokens in what is left
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common.kv.memory_plan import DeviceMemory
from common.nodes import Role
from common.settings.config import (
    Config,
    EngineConfig,
    HandoffConfig,
    ModelConfig,
    SpeculationConfig,
)
from engine.runner.start.load import load_model_runner
from node.life.make_scheduler import max_chunk_tokens_of, speculation_of
from pdserve.checkpoints.demo_model import demo_model_folder
from pdserve.checkpoints.speculative_model import resolve_speculation

NODES = {
    "prefill": (Role.PREFILL, 64),
    "decode": (Role.DECODE, 64),
    "decode without local prefill": (Role.DECODE, 0),
}
NUM_DRAFTS = (0, 1, 3, 5)
_MIB = 1 << 20


def config_of(node: str, num_drafts: int) -> Config:
    """Return the configuration of a row."""
    role, threshold = NODES[node]
    return Config(
        role=role,
        model=ModelConfig(model=str(demo_model_folder())),
        engine=EngineConfig(memory_fraction=1.0),
        handoff=HandoffConfig(local_prefill_threshold=threshold),
        speculation=SpeculationConfig(
            speculative_method="mtp" if num_drafts else "none", num_speculative_tokens=num_drafts
        ),
    )


def planned(node: str, num_drafts: int, memory_bytes: int) -> dict[str, object]:
    """Load a node's model on so much memory; return the row's figures."""
    from engine.runner.memory_meter import HostMeter

    class SmallHost(HostMeter):
        """This process on a host with `memory_bytes`."""

        def memory(self) -> DeviceMemory:
            return DeviceMemory(memory_bytes, "the memory of this row", 1.0)

    config = config_of(node, num_drafts)
    runner = load_model_runner(
        config.model,
        config.engine,
        speculation=resolve_speculation(speculation_of(config), Path(config.model.model)),
        max_chunk_tokens=max_chunk_tokens_of(config),
        meter=SmallHost(),
    )
    plan = runner.memory
    assert plan is not None
    return {
        "node": node,
        "drafts": num_drafts,
        "tokens": plan.max_chunk_tokens,
        "buffers_mib": round(plan.step_buffer_bytes / _MIB, 1),
        "peak_mib": round(plan.peak_bytes / _MIB),
        "kv_blocks": runner.num_blocks,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.memory_plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    parser.add_argument("--memory", type=int, default=4096, help="MiB for all of a node")
    parser.add_argument("--row", nargs=2, metavar=("NODE", "DRAFTS"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.row:
        node, num_drafts = options.row
        print(json.dumps(planned(node, int(num_drafts), options.memory * _MIB)))
        return 0
    rows = []
    for node in NODES:
        for num_drafts in NUM_DRAFTS:
            again = [
                sys.executable,
                "-m",
                "bench.engine.memory_plan",
                "--memory",
                str(options.memory),
            ]
            done = subprocess.run(
                [*again, "--row", node, str(num_drafts)],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                timeout=300,
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(" | ".join(str(value) for value in rows[-1].values()))
    if options.json:
        print(json.dumps({"memory_mib": options.memory, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
