"""The cluster as people see and operate it.

view               readiness, /v1/cluster, and what the live page reads
layout_mismatches  prefill nodes whose KV no decode node can take
drain              `POST /v1/cluster/drain`: a node leaves in order
"""
