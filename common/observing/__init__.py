"""Time and observation.

clock            monotonic and manual clocks
histogram        counts of values by size
latency          TTFT, TPOT, goodput: what they mean
lasting_failure  when a failure that lasts is logged again
logs             log lines as text or JSON
log_output       where they are written, without waiting for who reads them
tracing          the interface of traces, and the one that records nothing
"""
