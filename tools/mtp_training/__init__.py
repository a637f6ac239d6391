"""Distilling a multi-token-prediction layer from a model's own greedy answers."""
