"""The cluster for its users and operators.

view               readiness, /v1/cluster, and what the live page reads
layout_mismatches  prefill nodes whose KV layout no decode node has
missing_nodes      why no node can finish an answer; nodes that are heard and not listed
cluster_routes     `/ready` and `/v1/cluster`
shapes             what these endpoints take and answer, for /openapi.json
drain              `POST /v1/cluster/drain`: a node drains
"""
