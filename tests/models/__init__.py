"""Models that are too large for the everyday tests: `make test-models`."""
