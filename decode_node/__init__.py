"""The decode node: reserves blocks before prefill starts, receives KV, decodes.

The mixed node has the same flow: it prefills every prompt itself.
"""
