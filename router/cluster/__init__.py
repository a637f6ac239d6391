"""The cluster for its users and operators.

view            readiness, /v1/cluster, and what the live page reads
troubles        nodes that are missing, not listed, or whose KV no node can take
cluster_routes  `/ready` and `/v1/cluster`
shapes          what these endpoints take and answer, for /openapi.json
drain           `POST /v1/cluster/drain`: a node drains
"""
