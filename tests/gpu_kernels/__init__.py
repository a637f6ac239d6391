"""The kernels of engine/runner/gpu without a card: `make test-kernels`."""
