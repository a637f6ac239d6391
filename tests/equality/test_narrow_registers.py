"""Processors without AVX-512 compute the same bits, with kernels of other shapes.

Its kernels are compiled anew, so this is a part of `--every-combination`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.equality import narrow_registers
from tests.support.models import demo_digests

pytestmark = demo_digests.WITH_FMA


def test_logits_without_avx_512(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", narrow_registers.__name__],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    digests = [f"{dtype} {digest}" for dtype, digest in demo_digests.DIGESTS.items()]
    assert printed == ["avx2 plain", *digests]
