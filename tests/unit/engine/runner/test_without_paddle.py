"""A node on the CPU kernels never imports Paddle, which would take time, memory and signals.

Nor does it import Triton, which looks for no card either.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

SERVE = """
import sys
from common.settings.config import EngineConfig, ModelConfig
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from engine.core.step.step_batch import batch_of
from engine.runner.start.load import load_model_runner

backend = sys.argv[2]
called = []
runner = load_model_runner(
    ModelConfig(model=sys.argv[1], max_model_len=64),
    EngineConfig(block_size=16, max_num_batched_tokens=32, max_num_seqs=2, num_threads=1,
                 kv_cache_memory=1 << 20, attention_backend=backend),
    host_space=1 << 20,
    on_imported=lambda: called.append("paddle" in sys.modules),
)
runner.swap_out([0, 1], [0, 1])
runner.swap_in([0, 1], [0, 1])
way = SamplingParams(max_tokens=1, temperature=0.5, top_p=0.9, logprobs=1)
runner.execute(batch_of([ScheduledSequence(0, [1, 2], 0, [0], SampleInput(way, 0, [1, 2], []))]))
assert "triton" not in sys.modules
print(called, "paddle" in sys.modules, bool(runner.kv_bytes.any()))
"""


def served(folder: Path, backend: str) -> str:
    command = [sys.executable, "-c", SERVE, str(folder), backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_compute_without_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["llama"])
    assert served(folder, "auto") == "[False] False True"


def test_its_signal_handlers_are_there_before_the_node_sets_its_own(tmp_path: Path) -> None:
    """`on_imported` comes after its import where it is needed."""
    folder = write_checkpoint(tmp_path, CONFIGS["llama"])
    assert served(folder, "paddle") == "[True] True True"
