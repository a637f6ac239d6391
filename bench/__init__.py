"""Measurements, one script each: `python -m bench.engine --json` prints one JSON line last."""
