"""The cost of a router: its own CPU time, its latency and its memory."""
