"""The virtual machine for RDMA has every module that its suite imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

from tests.rdma.vm.__main__ import PYTEST, TREE
from tests.rdma.vm.image import ROOT, WHEELS, pins_of_wheels

COLLECT = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"the machine has no {name}", name=name)

refused = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def test_the_suite_can_be_collected_with_what_the_machine_gets(tmp_path: Path) -> None:
    for name in TREE:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, target)
        else:
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
    _, _, options = PYTEST.partition(" -m pytest ")
    installed = {pin.partition("==")[0] for pin in pins_of_wheels()}
    assert set(WHEELS) <= installed
    missing = {
        module
        for module, found in packages_distributions().items()
        if not installed & {name.lower().replace("_", "-") for name in found}
    }
    missing |= {path.name for path in ROOT.iterdir()}
    missing -= {name.partition("/")[0] for name in TREE}
    done = subprocess.run(
        [
            *(sys.executable, "-c", COLLECT, ",".join(missing)),
            *("--collect-only", "-p", "pytest_timeout", *options.split()),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "test_kv_same_answers.py::" in done.stdout
