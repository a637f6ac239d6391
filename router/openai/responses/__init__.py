"""`/v1/responses` as a translation: of a request into a chat, and of its answer into items.

request  from a body to the body of a chat
answer   events about items, and the whole response
"""
