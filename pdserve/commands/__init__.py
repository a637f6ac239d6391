"""Commands that talk to a running router.

cluster_status  `/v1/cluster` of a router, read and checked
status_table    `pdserve status`: the cluster as tables
status_watch    `pdserve status --watch`
chat_command    `pdserve chat`
answer_stream   answers that stream, piece by piece
drain_command   `pdserve drain`
role_command    `pdserve role`
node_name       the name of a node, checked before a router is asked
http_client     a small HTTP client, bounded in time and size
router_key      the API key that they send: from a file, a flag or a variable
"""
