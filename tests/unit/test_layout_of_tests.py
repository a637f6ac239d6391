"""Where tests and their helpers lie, and what of the product they may touch."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.unit.tree import ROOT, name_of, parsed, python_files

UNIT = ROOT / "tests/unit"
OF_NAMED_TUPLES = frozenset({"_asdict", "_fields", "_make", "_replace"})
NOT_THE_PRODUCT = ("tests/", "bench/", "tools/")
# How often each of these touches private members of the product. The list only becomes shorter:
# what a test must see, the code shows to everyone.
TOUCHING = {
    "tests/contract/kv_connector/test_kv_addresses.py": 3,
    "tests/contract/kv_connector/test_kv_endings.py": 4,
    "tests/contract/kv_connector/test_kv_late_copies.py": 8,
    "tests/contract/kv_connector/test_kv_queued_calls.py": 6,
    "tests/contract/kv_connector/test_kv_restarts.py": 1,
    "tests/contract/kv_connector/test_kv_shm.py": 1,
    "tests/contract/kv_connector/test_kv_threads.py": 2,
    "tests/contract/placement_store/worlds.py": 1,
    "tests/gpu_kernels/test_going_on.py": 5,
    "tests/gpu_kernels/test_quantised_runner.py": 1,
    "tests/gpu_kernels/test_runner.py": 3,
    "tests/integration/test_dispatch.py": 2,
    "tests/integration/test_dispatch_pairs.py": 4,
    "tests/integration/test_node_clients.py": 2,
    "tests/integration/test_nodes_that_leave.py": 3,
    "tests/integration/test_router_safety.py": 1,
    "tests/property/engine/workload.py": 1,
    "tests/rdma/test_rdma_endings.py": 2,
    "tests/simulation/test_request_endings.py": 1,
    "tests/simulation/test_reservation_faults.py": 1,
    "tests/support/engine/build.py": 9,
    "tests/support/http/http_edge.py": 4,
    "tests/support/kv/kv_cluster.py": 2,
    "tests/support/models/running.py": 1,
    "tests/unit/common/files/test_code_cache.py": 1,
    "tests/unit/engine/core/blocks/test_block_pool.py": 3,
    "tests/unit/engine/runner/cache/test_device_copies.py": 1,
    "tests/unit/engine/runner/cpu/test_packed_weights.py": 1,
    "tests/unit/engine/runner/paddle/test_tiled_attention.py": 1,
    "tests/unit/engine/runner/test_layer_hook.py": 3,
    "tests/unit/grammars/trying/test_trial_queue.py": 2,
    "tests/unit/kv_transfer/lanes/rdma/test_rdma_lane.py": 2,
    "tests/unit/kv_transfer/zmq/test_zmq_readiness.py": 1,
    "tests/unit/node/flow/attempts/test_attempt_table.py": 2,
    "tests/unit/node/life/test_engine_node.py": 4,
    "tests/unit/node/life/test_make_scheduler.py": 1,
    "tests/unit/node/life/test_step_thread.py": 2,
    "tests/unit/pdserve/configuration/test_command_line.py": 1,
    "tests/unit/router/access/test_arriving_bodies.py": 1,
    "tests/unit/router/api/test_answer.py": 1,
    "tests/unit/router/dispatch/test_placement_recorder.py": 4,
    "tests/unit/router/http/test_described_endpoints.py": 2,
    "tests/unit/router/http/test_router_drain.py": 1,
    "tests/unit/router/live/test_live_feed.py": 1,
    "tests/unit/router/text/test_detokenizer.py": 2,
}


PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
DEFINED = re.compile(
    r"(?:\bdef |\bclass |\b(?:self|cls)\.|^ *)(_[A-Za-z]\w*)(?=[(:\[]| *(?:=[^=]|:))", re.MULTILINE
)


def files_of_tests() -> list[Path]:
    return [path for path in python_files() if name_of(path).startswith("tests/")]


def test_unit_tests_lie_in_the_folder_that_their_code_has() -> None:
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}
    assert len(folders) > 50, "the tests were found"
    assert {folder.as_posix() for folder in folders if not (ROOT / folder).is_dir()} == set()


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports of tests, and of what it imports from them."""
    names, text = set[str](), path.read_text()
    for node in ast.walk(parsed(text)) if "tests" in text else ():
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(name for name in names if name.startswith("tests."))


def test_no_two_modules_have_one_name() -> None:
    """Pytest would collect one of them alone, where their folders are no packages."""
    found = (ROOT / "tests").rglob("test_*.py")
    paths = [one for one in found if not (one.parent / "__init__.py").exists()]
    names = Counter(path.name for path in paths)
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_is_imported_from_a_test_module() -> None:
    """What two test modules need is a helper beside them, or in `tests/support`."""
    modules = {
        name_of(path).removesuffix(".py").replace("/", ".")
        for path in files_of_tests()
        if path.name.startswith("test_")
    }
    found = {
        f"{name_of(path)}: {name}"
        for path in python_files()
        for name in imported(path)
        if name in modules or name.rpartition(".")[0] in modules
    }
    assert found == set()


def test_helpers_of_one_folder_lie_beside_its_tests() -> None:
    """What unit tests of several folders import is in `tests/support`."""
    found = {
        f"{name_of(path)}: {name}"
        for path in files_of_tests()
        for name in imported(path)
        if (module := home_of(name)) and UNIT in module.parents
        if module.parent not in path.parents
    }
    assert found == set()


def home_of(name: str) -> Path | None:
    """Return the file of the module that a dotted name is, or is in; None where it is a package."""
    for dotted in (name, name.rpartition(".")[0]):
        path = ROOT / f"{dotted.replace('.', '/')}.py"
        if path.is_file():
            return path
    return None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def defined_in(tree: ast.AST) -> set[str]:
    """Return the private names of functions, classes, constants and attributes that are made."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if is_private(name)}


@cache
def private_names_of_the_product() -> frozenset[str]:
    product = [p for p in python_files() if not name_of(p).startswith(NOT_THE_PRODUCT)]
    return frozenset().union(*(DEFINED.findall(path.read_text()) for path in product))


def is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def touched_in(tree: ast.AST) -> Counter[str]:
    """Return how often `tree` touches each private name of other objects, or imports it."""
    touched = Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            touched[node.attr] += 1
        elif isinstance(node, ast.ImportFrom):
            touched.update(alias.name for alias in node.names)
    return Counter({name: count for name, count in touched.items() if is_private(name)})


def touched_of_the_product(path: Path) -> int:
    """Return how often a file of tests touches what only the product makes private."""
    text = path.read_text()
    if not PRIVATE.search(text):
        return 0
    tree = parsed(text)
    touched, own = touched_in(tree), defined_in(tree)
    product = private_names_of_the_product()
    return sum(n for name, n in touched.items() if name in product and name not in own)


@pytest.mark.parametrize(
    ("source", "touched"),
    [
        ("pool._free", 1),
        ("world.node._inbox._messages.clear()", 2),
        ("from router.live import feed\nfeed._json(1)", 1),
        ("from tools.train_mtp import _parser", 1),
        ("class A:\n  def f(self):\n    return self._x + super()._x", 0),
        ("plan._replace(x=1)", 0),
        ("object.__init__", 0),
    ],
)
def test_what_counts_as_touching(source: str, touched: int) -> None:
    assert touched_in(ast.parse(source)).total() == touched


def test_tests_touch_no_private_members() -> None:
    found = {name_of(path): touched_of_the_product(path) for path in files_of_tests()}
    more = {name: count for name, count in found.items() if count > TOUCHING.get(name, 0)}
    assert more == {}, "these touch more private members than before"
    fewer = {name: found.get(name, 0) for name in TOUCHING if found.get(name, 0) < TOUCHING[name]}
    assert fewer == {}, "these touch fewer: write that into TOUCHING"
