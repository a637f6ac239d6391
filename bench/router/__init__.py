"""What a router costs: its own CPU time, its latency and its memory."""
