"""What a router counts, remembers and chooses, compared with what follows from its requests.

requests  what counts on nodes, and requests that suspected nodes hold up
choices   chosen nodes, and what is known of sessions
known     what is known of nodes, and of their blocks
told      what flows tell beside tokens
"""
