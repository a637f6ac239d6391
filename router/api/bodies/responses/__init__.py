"""Bodies of `/v1/responses` as chats.

request       from a body to the body of a chat
conversation  items of the input as turns of a chat
tools         tools of several kinds as functions of a chat
"""
