"""Checks of a router's books: its counts, sessions and choices follow from its requests.

requests  requests and tokens counted on nodes, nodes that a request has lost, and requests that
          suspected nodes hold up
choices   chosen nodes, and the nodes of sessions
known     the records of nodes and of their blocks
told      the effects of flows beside tokens
"""
