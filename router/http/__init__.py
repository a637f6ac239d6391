"""One HTTP exchange over ASGI.

server     the port: its limits, serving until a stop or drain
exchange   a bounded body in, one reply out, and detection of clients that leave
sse        server-sent events and the JSON inside them
api_docs   the page that describes the API
documented_api  puts the words of api_texts into that description
described  how a route names what it takes and answers, errors above all
probes     `/health`, `/version` and `/metrics`
routes     who may call a route: declared with it, found from the one that is matched
errors     every error in OpenAI's shape
"""
