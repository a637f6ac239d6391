"""How much of a handoff hides behind the prefill: `python -m bench.handoff --json`."""
