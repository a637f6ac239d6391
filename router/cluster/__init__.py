"""The cluster for its users and operators.

view               readiness, /v1/cluster, and what the live page reads
layout_mismatches  prefill nodes whose KV layout no decode node has
drain              `POST /v1/cluster/drain`: a node drains
"""
