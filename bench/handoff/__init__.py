"""How much of a handoff overlaps with the prefill: `python -m bench.handoff --json`."""
