"""The router's end of one node: calls go out, and what the node says comes in.

node_clients   one node: its stream, opened again when that ends
node_calls     what is asked of the node on the stream
stream_calls   calls of the node: not sent yet, or without a reply
node_messages  what is heard from the node on the stream
node_listener  what a node's end tells its owner
calls_beside   calls beside the stream: to leave, and to take another role
fairness       how much of a burst of outputs is passed on before others have a turn
"""
