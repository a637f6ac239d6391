"""What a node shows.

metrics          the node's statistics as Prometheus samples
kv_metrics       the KV connector's statistics
grammar_metrics  what following grammars takes
memory_metrics   what the node's memory is for
metric_families  Prometheus families made from numbers
metrics_server   these samples over HTTP
attempt_watch    attempts that ended, as log lines and spans
attempt_spans    the spans of an attempt
"""
