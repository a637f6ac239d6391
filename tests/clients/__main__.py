"""Run what is done with each client, in an environment that is made for it.

    python -m tests.clients [names of clients]

A client that cannot be installed here is said with its reason ("skipped: …"). The exit status is 1
where a client failed.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.clients.demo_cluster import demo_cluster
from tests.clients.scripted_edge import scripted_edge

INSTALL_LIMIT_S = 300
RUN_LIMIT_S = 240
CLIENTS = {
    "anthropic": ("anthropic>=2.12",),
    "langchain": ("langchain-openai>=1.4",),
    "instructor": ("instructor>=1.17",),
    "litellm": ("litellm>=1.106", "mcp"),  # it imports mcp where a request has tools
    "lm_eval": ("lm_eval[api]>=0.4.13", "transformers"),  # the latter for its tokenizer alone
}
"""What is installed for each client."""
NEED_A_MODEL = {"lm_eval"}
"""Those that judge what a model says: they get a real cluster."""


class CannotInstall(Exception):
    """This machine cannot have a client; the text says why."""


def install(folder: Path, packages: tuple[str, ...]) -> Path:
    """Make an environment with `packages`; return its interpreter. Raises `CannotInstall`."""
    venv.create(folder, with_pip=True)
    interpreter = folder / "bin" / "python"
    command = [str(interpreter), "-m", "pip", "install", "-q", "--no-input", *packages]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"it took over {INSTALL_LIMIT_S} s") from None
    if done.returncode:
        raise CannotInstall((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return interpreter


@asynccontextmanager
async def served_for(name: str) -> AsyncIterator[list[str]]:
    """Serve what a client needs; the block gets the arguments of its script."""
    if name in NEED_A_MODEL:
        with demo_cluster() as (port, folder):
            yield [str(port), str(folder)]
    else:
        async with scripted_edge() as port:
            yield [str(port)]


async def run(interpreter: Path, name: str) -> bool:
    """Run a client; return whether all that it asserts holds."""
    script = Path(__file__).parent / f"with_{name}.py"
    async with served_for(name) as arguments:
        process = await asyncio.create_subprocess_exec(interpreter, script, *arguments)
        try:
            async with asyncio.timeout(RUN_LIMIT_S):
                return await process.wait() == 0
        except TimeoutError:
            process.kill()
            await process.wait()
            print(f"{name} took over {RUN_LIMIT_S} s", flush=True)
            return False


def main(names: list[str]) -> int:
    """Return the exit status."""
    failed = []
    for name in names or CLIENTS:
        with tempfile.TemporaryDirectory(prefix=f"pdserve-{name}-") as folder:
            try:
                interpreter = install(Path(folder), CLIENTS[name])
            except CannotInstall as error:
                print(f"skipped: {name}: {error}", flush=True)
                continue
            is_good = asyncio.run(run(interpreter, name))
        print(f"{name}: {'ok' if is_good else 'FAILED'}", flush=True)
        if not is_good:
            failed.append(name)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
