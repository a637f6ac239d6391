"""Compile the CPU kernels into the cache before tests run: no test's time limit includes it."""

from __future__ import annotations

from pdserve.checkpoints.demo_model import demo_model_folder
from tests.support.models.pressure import load_runner


def main() -> None:
    """Load the demo model, with its drafting layer, and execute steps of every kind."""
    for activations in ("int8", "float32"):
        runner = load_runner(demo_model_folder(False), 2, activation_dtype=activations)
        runner.warm_up()


if __name__ == "__main__":
    main()
