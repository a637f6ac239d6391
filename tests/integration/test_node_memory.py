"""What a demo node takes of a machine's memory beside its KV cache."""

from __future__ import annotations

import json
import subprocess
import sys

from pdserve.checkpoints.demo_model import demo_model_folder

MOST_MIB = 400
MOST_OF_LLVM_MIB = 30
"""13 MiB once its pages are returned; 70 before."""
LOAD = """
import json, re, sys
from pathlib import Path
from common.files.cache_folder import cache_root
from common.settings.config import EngineConfig, ModelConfig
from engine.runner.start.load import load_model_runner

def sizes():
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.findall(r"^(Rss|Pss|Private_Clean|Private_Dirty): +(\\d+) kB", text, re.MULTILINE)
    return {name: int(kib) / 1024 for name, kib in found}

def of_llvm():
    maps = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [re.search(r"^Rss: +(\\d+) kB", one, re.MULTILINE) for one in maps if "libllvm" in one]
    return sum(int(found[1]) for found in sizes) / 1024

runner = load_model_runner(
    ModelConfig(model=sys.argv[1]), EngineConfig(), packed_folder=cache_root() / "packed"
)
print(json.dumps({**sizes(), "llvm": of_llvm(), "shared": runner.memory.shared_bytes / (1 << 20)}))
"""


def test_a_demo_node_takes_little_beside_its_kv() -> None:
    """All resident pages count: libraries and the weights that nodes share too.

    The buffers of a step take up to 150 MiB more, as steps become that large.
    """
    command = [sys.executable, "-c", LOAD, str(demo_model_folder())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    assert sizes["shared"] > 80  # the weights are mapped, not copied
    assert 0 < sizes["llvm"] < MOST_OF_LLVM_MIB, sizes
    assert sizes["Rss"] < MOST_MIB, sizes
