"""The decode node: reserves before prefill starts, lets KV land, decodes. Also the mixed node."""
