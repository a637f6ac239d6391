"""The prefill node: computes prompts in chunks, draws the first token, sends KV blocks."""
