"""`/v1/responses` as a translation: of a request into a chat, and of its answer into items.

request       from a body to the body of a chat
conversation  items of the input as turns of a chat
tools         tools of several kinds as functions of a chat
answer        events about items, and the whole response
"""
