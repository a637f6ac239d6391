"""The time to a first token by where a prompt's start is: `python -m bench.prefix_tiers --json`.

One engine on the demo model answers prompts of `--tokens` tokens and one more, alone:

    computed_ms   nothing of the prompt is cached
    pool_ms       its full blocks are in the KV cache
    host_ms       the cache has evicted them, and they are copied back from host memory
    disk_ms       host memory has evicted them too, and they are read from files below `--folder`
    copied_mb     what is copied from host memory, once
    host_tokens   tokens of those prompts that came from host memory
    disk_tokens   tokens of those prompts that came from files

Files that were just written are read from the system's memory, as on a node that has room for them.

Two nodes behind a router are asked the same over HTTP, by turns, once for each lane:

    node_computed_ms  nothing of the prompt is cached, on either node
    pulled_zmq_ms     its full blocks are in the KV cache of the other node, and come over `zmq`
    pulled_shm_ms     the same over `shm`

    pulled_disk_ms    the same out of files of the other node, which memory there has not
                      any more; over `shm`

    zmq_over_computed, shm_over_computed, disk_over_computed    these over computing beside them

Each figure is the median over `--rounds` prompts of their own. On 2 idle cores it takes two
minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.prefix_tiers import from_files, in_one_engine, pulled
from pdserve.checkpoints.resolve import resolve_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print one JSON line last."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_tiers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="default: one for temporary files")
    parser.add_argument("--json", action="store_true", help="print one JSON line last")
    options = parser.parse_args(arguments)
    with TemporaryDirectory(dir=options.folder) as folder:
        engine = in_one_engine.Engine(
            resolve_checkpoint("demo"), options.tokens, Path(folder) / "prefixes"
        )
        figures = in_one_engine.measure(engine, options.tokens, options.rounds)
        del engine
        figures |= asyncio.run(pulled.measure(options.tokens, options.rounds))
        files = from_files.measure(options.tokens, options.rounds, Path(folder) / "nodes")
        figures |= asyncio.run(files)
    if not options.json:
        for name, value in figures.items():
            print(f"{name:18} {value}")
    else:
        print(json.dumps({"tokens": options.tokens, **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
