"""What a model loses by fewer bits of weights, activations and KV.

perplexity      of a novel, under each combination of settings
divergence      how far the default arithmetic is from float32
kv_forms        the same for forms of KV
weight_folders  a model's weights in other formats
"""
