"""Measurements and records of requests.

http_metrics    counts and times at the HTTP edge
router_metrics  counts of requests, nodes and the placement store
loop_metrics    counters and histograms cheap enough for every token
scaling_report  what the load wants of the cluster, for all who show it
edge_counters   counts for the live page
latency_window  percentiles of the last intervals
minute_line     what happened in the last minute, for the log
request_watch   one HTTP request: its log line and its span
choice_trace    one choice: its stages, its attempts and their nodes
recent_placements  the last attempts, with their outcomes
"""
