"""The Helm chart, rendered and validated without a cluster, and the alert rules.

tools           helm, the schemas of Kubernetes and promtool, fetched into a cache folder
manifests       the chart rendered with some values
rule_tests.yaml what the alert rules do with made series, for promtool
"""
