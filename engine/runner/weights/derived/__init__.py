"""Weights that are computed from those of another source, a file's or random ones.

derived_weights    what all of these have in common: a source over another
fused_weights      several projections in one tensor
fused_experts      all experts of a layer in one tensor
text_weights       the text model of a model with images
norm_offsets       norms less one
divided_logits     logits divided by a number
other_names        tensors that a family calls otherwise
rotary_order       query and key heads as they are rotated
quantised_source   weights in fewer bits
"""
