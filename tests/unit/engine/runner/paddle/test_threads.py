"""Paddle is imported by the thread that loads a model, and computes in another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.models.tiny_checkpoints import CONFIGS, write_checkpoint

SCRIPT = """
import sys
import threading
from pathlib import Path
from tests.support.models.running import load, logits_of, scheduled

loaded, found = [], []
def compute():
    found.append(logits_of(loaded[0], scheduled([5, 6, 7], 0, range(1)))[0].shape)
for body in (
    lambda: loaded.append(load(Path(sys.argv[1]), attention_backend="paddle")), compute, compute,
):
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
compute()
print(found)
"""


def test_steps_run_after_the_thread_that_loaded_has_ended(tmp_path: Path) -> None:
    """As in a node: its end took Paddle out of its dynamic mode, and every step failed."""
    folder = write_checkpoint(tmp_path, CONFIGS["qwen3_moe"])
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == str([(97,)] * 3), done.stderr
