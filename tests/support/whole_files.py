"""Whole files of tests for each process of a run, which collects a file when it is its turn.

pytest-xdist has every process of a run import all test files and collect all tests, and compares
what they found: of a run of six processes that is an eighth of the time, and a gigabyte for each.
Here a process only finds the files at first. Each file is imported, and its tests are collected, by
the one process that runs it. So the number of tests is known at the end of a run alone.

A run that chooses among the tests of a file, by `-k` for example, collects them at first as usual.

What a process tells of its tests is in `told_reports`.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TOGETHER = (
    "tests/integration/on_shared_clusters/",
    "tests/unit/engine/runner/",
    "tests/equality/",
    "tests/unit/test_",
)
"""What one process takes as a whole, the one that takes longest first. Tests of the first
share clusters of up to five processes. Those of the second need the kernels of every format: where
`tests.support.compiled_kernels` has not run before, several processes that need one at once would
each compile it, two minutes of CPU time each. Those of the third share runners of the demo model,
and those of the last, which look at all sources, what these were parsed to
(`tests.unit.tree.parsed`)."""
LONGEST = (
    "tests/integration/", "tests/contract/", "tests/simulation/",
    "tests/unit/tools/test_train_mtp.py",
)  # fmt: skip
"""Folders whose files take longest, and a file that takes as long as they and would begin last."""
_CHOICES = ("keyword", "markexpr", "lf", "failedfirst", "newfirst", "stepwise", "collectonly")
"""Options of pytest that choose among tests, or order them."""


class WholeFile(pytest.Item):
    """All tests of a file, before they are collected. They run in its place."""

    def tests(self) -> list[pytest.Item]:
        """Import the file, and return its tests: none if that fails, which is reported."""
        assert self.parent is not None
        module = pytest.Module.from_parent(self.parent, path=self.path)
        tests = list(self.session.genitems(module))
        self.config.hook.pytest_collection_modifyitems(
            session=self.session, config=self.config, items=tests
        )
        # What a file imports stays. Tests that collect garbage would look at it each time.
        gc.collect()
        gc.freeze()
        return tests

    def runtest(self) -> NoReturn:
        raise AssertionError(f"{self.nodeid} runs in place of its tests")


def takes_whole_files(config: pytest.Config) -> bool:
    """Return whether a run distributes files, and takes all tests of each."""
    option = config.option
    is_choosing = any(getattr(option, name, None) for name in _CHOICES)
    return option.dist == "loadfile" and not is_choosing and not any("::" in a for a in config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Tell a process of a run whether it collects files when it is their turn."""
    node.workerinput["takes_whole_files"] = takes_whole_files(node.config)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> WholeFile | None:
    """Put off the collection of a file; None leaves it to pytest."""
    config = parent.config
    if not getattr(config, "workerinput", {}).get("takes_whole_files"):
        return None
    place = module_path.relative_to(config.rootpath).as_posix()
    file: WholeFile = WholeFile.from_parent(
        parent, name=module_path.name, path=module_path, nodeid=place
    )
    file.add_marker(pytest.mark.timeout(0))  # its tests have limits, each its own
    return file


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a file's tests. After the last one those fixtures end that the next file has not."""
    if not isinstance(item, WholeFile):
        return None
    session = item.session
    place = session.items.index(item)
    tests = item.tests()
    for test, following in zip(tests, [*tests[1:], nextitem], strict=False):
        session.items[place] = test  # where xdist looks for what is reported
        test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    session.items[place] = item
    if not tests:
        _end_fixtures(item, nextitem)
    return True


def _end_fixtures(file: WholeFile, nextitem: pytest.Item | None) -> None:
    """End what the next file has no use for, where a file has no test that would; report errors."""
    end = partial(file.session._setupstate.teardown_exact, nextitem)
    call = pytest.CallInfo.from_call(end, when="teardown")
    if call.excinfo:
        report = file.ihook.pytest_runtest_makereport(item=file, call=call)
        file.ihook.pytest_runtest_logreport(report=report)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that processes end together."""
    items.sort(key=lambda item: _turn(item.nodeid))


def _turn(nodeid: str) -> int:
    """Return when in a run a test begins, 0 first."""
    if folder := _folder_of(nodeid):
        return TOGETHER.index(folder)
    return len(TOGETHER) + (not nodeid.startswith(LONGEST))


def _folder_of(nodeid: str) -> str | None:
    """Return what of `TOGETHER` a test belongs to."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)


class WholeFolders(LoadFileScheduling):  # type: ignore[misc]
    """Give each process whole files in the order of collection, and the folders of `TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        return _folder_of(nodeid) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFolders | None:
    """Replace `--dist loadfile`; None leaves other ways of distribution to xdist."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by numbers of tests, which do not say how long
    return WholeFolders(config, log)
