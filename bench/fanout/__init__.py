"""What a prefill node pays for the number of decode nodes: `python -m bench.fanout --json`."""
