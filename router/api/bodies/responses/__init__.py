"""Bodies of `/v1/responses` as chats.

request  from a body to the body of a chat
"""
