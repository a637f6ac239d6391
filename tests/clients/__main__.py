"""Run what is done with each client, in an environment that is made for it.

    python -m tests.clients [names of clients]

A client that cannot be installed here is said with its reason ("skipped: …"). The exit status is 1
where a client failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import venv
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clients.real_cluster import real_cluster
from tests.clients.scripted_edge import scripted_edge

INSTALL_LIMIT_S = 900
"""pip gives up by itself where an index is silent: this is for one that is slow."""
RUN_LIMIT_S = 120
CLUSTER_RUN_LIMIT_S = 300
"""Time of a client that measures: it starts processes of its own, which import much."""


@dataclass(frozen=True, slots=True)
class Client:
    """What is installed for a client. `needs_cluster`: what it measures needs a model."""

    packages: tuple[str, ...]
    needs_cluster: bool = False


CLIENTS = {
    "anthropic": Client(("anthropic>=2.12",)),
    "langchain": Client(("langchain-openai>=1.4",)),
    "instructor": Client(("instructor>=1.17",)),
    "litellm": Client(("litellm>=1.106", "mcp")),  # it imports mcp where a request has tools
    "aiperf": Client(("aiperf>=0.13,<0.14",), needs_cluster=True),
    # Its PyTorch, with CUDA, takes 6 GB of disk.
    "guidellm": Client(("guidellm>=0.8,<0.9",), needs_cluster=True),
    # transformers for its tokenizer alone.
    "lm_eval": Client(("lm_eval[api]>=0.4.13", "transformers"), needs_cluster=True),
}


class CannotInstall(Exception):
    """This machine cannot have a client; the text says why."""


def install(folder: Path, client: Client) -> Path:
    """Make an environment for a client; return its interpreter. Raises `CannotInstall`."""
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    command = [str(interpreter), "-m", "pip", "install", "-q", "--no-input", *client.packages]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"pip install took over {INSTALL_LIMIT_S} s") from None
    if done.returncode:
        raise CannotInstall((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return interpreter


def script_of(name: str) -> str:
    """Return the path of what is done with a client."""
    return str(Path(__file__).parent / f"with_{name}.py")


def run_on_cluster(interpreter: Path, name: str) -> bool:
    """Run a client against a real cluster; return whether all that it asserts holds.

    A cluster that does not start, or does not end as it should, fails this client alone.
    """
    try:
        with real_cluster() as (port, model):
            return _ends_well([str(interpreter), script_of(name), str(port), str(model)], name)
    except Exception:
        traceback.print_exc()
        return False


def _ends_well(command: list[str], name: str) -> bool:
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(CLUSTER_RUN_LIMIT_S) == 0
    except subprocess.TimeoutExpired:
        print(f"{name} took over {CLUSTER_RUN_LIMIT_S} s", flush=True)
        return False
    finally:
        _end_group(process.pid)
        process.wait()


def _end_group(leader: int) -> None:
    """End a client and the processes that it started, which are of its session."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def run(interpreter: Path, name: str) -> bool:
    """Run a client against the scripted API; return whether all that it asserts holds."""
    async with scripted_edge() as port:
        process = await asyncio.create_subprocess_exec(
            interpreter, script_of(name), str(port), start_new_session=True
        )
        try:
            async with asyncio.timeout(RUN_LIMIT_S):
                return await process.wait() == 0
        except TimeoutError:
            print(f"{name} took over {RUN_LIMIT_S} s", flush=True)
            return False
        finally:
            _end_group(process.pid)
            await process.wait()


def main(names: list[str]) -> int:
    """Return the exit status."""
    failed = []
    for name in [one.replace("-", "_") for one in names] or CLIENTS:
        with tempfile.TemporaryDirectory(prefix=f"pdserve-{name}-") as folder:
            client, began_s = CLIENTS[name], time.monotonic()
            try:
                interpreter = install(Path(folder), client)
            except CannotInstall as error:
                print(f"skipped: {name}: {error}", flush=True)
                continue
            if client.needs_cluster:
                is_good = run_on_cluster(interpreter, name)
            else:
                is_good = asyncio.run(run(interpreter, name))
        took_s = time.monotonic() - began_s
        print(f"{name}: {'ok' if is_good else 'FAILED'}, {took_s:.0f} s", flush=True)
        if not is_good:
            failed.append(name)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
