"""Models that are odd or too large for the everyday tests: `make test-models`."""
