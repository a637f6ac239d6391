"""Run a command of this repository in a small virtual machine that has two RDMA devices.

    python -m tests.rdma.vm [--timeout S] [--tree PATH…] [-- COMMAND…]

Without a command: the connectors' contract suite and the tests of this folder, then what the
connector reaches of Mooncake's own speed.

The devices are software (`rdma_rxe`, RDMA over Converged Ethernet): real verbs, queue pairs and
memory keys, and no hardware. QEMU emulates the processor, so everything is ten to thirty times
slower than outside: what is shown here is behaviour, not speed.

The exit status is the command's; 124 where it took too long. Where the machine cannot be had, that
is said with its reason ("skipped: …"), and the status is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.rdma.vm.image import ROOT, CannotBuild, Image, make_image, pack

TREE = (
    "common",
    "engine",
    "grammars",
    "kv_transfer",
    "node",
    "tests/__init__.py",
    "tests/contract/kv_connector",
    "tests/rdma",
    "tests/simulation",
    "tests/support",
)
PYTEST = (
    "python3 -m pytest -q -c tests/rdma/vm/pytest.ini --rootdir=. --confcutdir=. "
    "-p tests.rdma.contract_plugin --durations=8 tests/rdma tests/contract/kv_connector"
)
SUITE = ("sh", "-c", f"{PYTEST} && python3 -m tests.rdma.over_direct")
MEMORY_MIB = 2048
TIMED_OUT = 124
NO_MACHINE = 125


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.vm", description=__doc__)
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds for the machine")
    parser.add_argument("--tree", nargs="*", default=TREE, help="what the machine gets to see")
    parser.add_argument("command", nargs="*", default=SUITE)
    options = parser.parse_args(arguments)
    try:
        image = make_image(_say)
    except CannotBuild as error:
        print(f"skipped: no virtual machine for RDMA here: {error}", flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="pdserve-rdma-vm-") as work:
        return run_in_machine(
            image, options.command, options.tree, Path(work), timeout_s=options.timeout
        )


def run_in_machine(
    image: Image, command: Sequence[str], tree: Sequence[str], work: Path, *, timeout_s: float
) -> int:
    """Boot, run `command` on a copy of `tree`, pass on what it prints; its exit status."""
    _say("booting")
    output, status = work / "output", work / "status"
    output.touch()
    _add_job(image, work, command, tree)
    machine = subprocess.Popen(_qemu(image, work), stdin=subprocess.DEVNULL)
    try:
        _follow(machine, output, time.monotonic() + timeout_s)
    except TimeoutError:
        _say(f"not done within {timeout_s:g} s")
        return TIMED_OUT
    finally:
        machine.kill()
        machine.wait()
    text = status.read_text().strip() if status.exists() else ""
    if not text.isdigit():
        _say("the machine ended without a status; its console said:")
        print((work / "console").read_text(errors="replace")[-3000:], file=sys.stderr)
        return NO_MACHINE
    return int(text)


def _add_job(image: Image, work: Path, command: Sequence[str], tree: Sequence[str]) -> None:
    """The image and, behind it, the sources and the command, as one RAM disk."""
    job = work / "ramdisk" / "job"
    for name in tree:
        target = job / "tree" / name
        if (ROOT / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        else:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, target, ignore=ignore)
    (job / "command").write_text(f"exec {shlex.join(command)}\n")
    pack(work / "ramdisk", work / "job.cpio")
    with (work / "initrd").open("wb") as joined:
        for part in (image.initrd, work / "job.cpio"):
            with part.open("rb") as source:
                shutil.copyfileobj(source, joined, 1 << 20)


def _qemu(image: Image, work: Path) -> list[str]:
    machine = "-accel tcg,thread=multi -cpu max -smp 2 -nodefaults -no-reboot -nic none"
    command = ["qemu-system-x86_64", *machine.split(), "-m", str(MEMORY_MIB)]
    command += ["-display", "none", "-kernel", str(image.kernel), "-initrd", str(work / "initrd")]
    command += ["-append", "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off"]
    for name in ("console", "output", "status"):
        command += ["-serial", f"file:{work / name}"]
    return command


def _follow(machine: subprocess.Popen[bytes], output: Path, deadline_at_s: float) -> None:
    """Pass on what the command prints until the machine ends. Raises `TimeoutError`."""
    with output.open("rb") as lines:
        while machine.poll() is None:
            if time.monotonic() > deadline_at_s:
                raise TimeoutError
            _pass_on(lines.read())
            with contextlib.suppress(subprocess.TimeoutExpired):
                machine.wait(0.1)
        _pass_on(lines.read())


def _pass_on(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def _say(text: str) -> None:
    print(f"rdma-vm: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
