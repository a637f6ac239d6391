"""What a node shows.

metrics          the node's statistics, leases and memory as Prometheus samples
kv_metrics       the KV connector's statistics
grammar_metrics  what following grammars takes
metric_families  Prometheus families made from numbers
metrics_server   these samples over HTTP
attempt_watch    attempts that ended, as log lines and spans
attempt_spans    the spans of an attempt

Decisions:

Spans are made from times that are recorded anyway. The stages of the first token and a transfer's
metrics need the same moments, so tracing adds no work to the step thread: it passes on which
attempts ended, and the event loop makes the spans. Only a traced request carries a span context, so
the sampling decision is made once, and tracing that is off costs nothing.


"""
