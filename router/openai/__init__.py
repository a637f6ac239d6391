"""The OpenAI API: from a request body to tokens to an answer in OpenAI's shape.

api             both generation endpoints
schemas         the request bodies, and what becomes of every field
json_limits     bounds on a body's structure, checked before it is parsed
request_plan    from a parsed body to prompts and sampling parameters
chat_messages   chat messages as chat templates expect them
answer          the sink of all choices of a request, on its way to its client
formats         the two shapes of an answer, streamed and whole
"""
