"""Weights that are computed from those of another source, a file's or random ones.

Each subject is one `DerivedWeights` over another: `fused_weights` (several projections in one
tensor), `fused_experts` (all experts of a layer in one), `text_weights` (the text model of a model
with images), `norm_offsets` (norms less one) and `quantised_source` (weights in fewer bits).
"""
