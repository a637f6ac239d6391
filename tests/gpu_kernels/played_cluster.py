"""`cluster_on_card` with nodes whose cards are Triton's interpreter: `python -m …played_cluster`.

The model has one layer, and what is asked of it takes a minute.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from tests.gpu import cluster_on_card
from tests.gpu.cluster.shapes import TINY
from tests.support.cluster import forked_serve
from tests.support.templates import NODES, Template

_NODES = "tests.gpu_kernels.played_nodes"
_LIMIT_S = 200.0
"""For a phase on a busy machine; a card takes a hundredth of it."""


LEAST = replace(
    TINY,
    config=TINY.config | {"num_hidden_layers": 1, "vocab_size": 400},
    bits_lengths=(20, 100),
    num_compared=4,
    compared_tokens=8,
    first_token_lengths=(20,),
    context=40,
    streamed_tokens={2: 4},
)


def main() -> int:
    """Run the phases that are named, but for `up`; return how many failed."""
    os.environ["TRITON_INTERPRET"] = "1"  # forks import kernels with this environment
    vars(forked_serve).update(NODES=Template((*NODES.modules[:-1], _NODES, NODES.modules[-1])))
    vars(cluster_on_card).update(TINY=LEAST)
    cluster_on_card.LIMITS_S.update(dict.fromkeys(cluster_on_card.ALL, _LIMIT_S))
    return cluster_on_card.main(["--shape", "tiny", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
