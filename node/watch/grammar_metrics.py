"""What following grammars takes, as Prometheus samples, made at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine.core.grammar_statistics import GrammarStatistics
from node.watch.metric_families import counter, counters, gauge, histograms


class GrammarCollector(Collector):
    """Reads the present statistics, on any thread; no samples of a node without grammars."""

    def __init__(self, latest: Callable[[], GrammarStatistics | None]) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Metric]:
        """Yield every sample."""
        statistics = self._latest()
        if statistics is None:
            return
        yield histograms(
            "grammar_compile_seconds",
            "From the text of a grammar to a matcher, by kind: json_schema, regex or lark",
            "kind",
            statistics.compile_s,
        )
        yield counters(
            "grammar_lookups",
            "Matchers asked for: of a grammar that was kept (cached), new (compiled) or refused",
            "result",
            statistics.lookups,
        )
        yield gauge("grammars_cached", "Compiled grammars that are kept", statistics.num_cached)
        yield gauge(
            "grammars_cached_bytes",
            "What the grammars that are kept weigh",
            statistics.cached_bytes,
        )
        yield counter(
            "grammar_masks",
            "Masks of allowed tokens, of rows that are not drawn without one",
            statistics.num_masks,
        )
        yield counter(
            "grammar_masks_seconds",
            "CPU time for filling masks",
            statistics.masks_s,
        )
        yield counter(
            "grammar_masks_wait_seconds",
            "Time for which steps waited for masks after their layers",
            statistics.waited_s,
        )
        yield counter(
            "grammar_forced_draft_tokens",
            "Draft tokens verified that a grammar forces; other drafts are not counted here",
            statistics.num_forced_drafted,
        )
        yield counter(
            "grammar_forced_accepted_tokens",
            "Draft tokens that a grammar forces and that became output",
            statistics.num_forced_accepted,
        )
        yield counters(
            "grammar_failures",
            "Requests ended by their grammar: not compiled (compile), too much work or a token "
            "refused (follow)",
            "kind",
            statistics.failures,
        )
