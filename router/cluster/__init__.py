"""The cluster for its users and operators.

view            readiness, /v1/cluster, and what the live page reads
troubles        nodes that are not listed, or whose KV no node can take
role_keeper     which router gives nodes other roles, and how
cluster_routes  `/ready`, `/v1/cluster` and `/v1/scaling`
shapes          what these endpoints take and answer, for /openapi.json
admin_calls     what an administrator asks of one node: who may, how, what goes wrong
role            `POST /v1/cluster/role`: a node is given another role
drain           `POST /v1/cluster/drain`: a node drains
"""
