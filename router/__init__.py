"""The router: HTTP in, a pair of nodes chosen for each choice of a request, tokens out.

It holds no Paddle and no state beyond its requests. Rooms by subject, from the edge inwards;
imports go down this list only:

    app         the web application: every route
    api/        the APIs of OpenAI and Anthropic: from a body to an answer
    cluster/    the cluster as people see and operate it: readiness, /v1/cluster, drain
    live/       the live page and its feed
    access/     API keys and their limits
    dispatch/   request flows performed on real nodes
    watch/      metrics, the log line and the trace of a request
    http/       one HTTP exchange: server, body, reply, events, errors
    text/       the text side of a model: tokenizer, templates, detokenizing, stop strings
    tools/      pure: calls of tools and thinking, in formats, parsers and grammars
    core/       pure: the machine of a request, placement, membership; the seams between the rooms
"""
