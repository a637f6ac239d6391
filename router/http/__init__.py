"""One HTTP exchange over ASGI, whatever it is about.

server    the port: its limits, serving until told to leave
exchange  a bounded body in, one reply out, and notice when the client leaves
sse       server-sent events and the JSON inside them
errors    every error in OpenAI's shape
"""
