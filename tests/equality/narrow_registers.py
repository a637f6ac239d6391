"""Print a digest of the demo model's logits per arithmetic, computed as without AVX-512.

A process of its own: kernels choose their shapes from the processor's features when imported.
"""

from __future__ import annotations

import os

from llvmlite import binding

WIDE = ("avx512", "avxvnni", "avx10", "amx")


def hide_wide_registers() -> None:
    """Let kernels and compiler see a processor that has AVX2 at most."""
    features = binding.get_host_cpu_features()
    hidden = [name for name in features if name.startswith(WIDE)]
    features.update(dict.fromkeys(hidden, False))
    os.environ["NUMBA_CPU_NAME"] = "haswell"
    os.environ["NUMBA_CPU_FEATURES"] = features.flatten()
    binding.get_host_cpu_features = lambda: features


def main() -> None:
    hide_wide_registers()
    # Imported now: these modules read the features.
    from engine.runner.kernels.products.byte_dot import available
    from tests.support.models.demo_digests import digest_of

    print(*available())
    for activation_dtype in ("float32", "int8"):
        print(activation_dtype, digest_of(activation_dtype))


if __name__ == "__main__":
    main()
