"""The weights of a folder, checked before any is read.

spec/             the parameters of a decoder
checkpoint        the weights of a folder
tensor_files      tensors of safetensors files
schemes/          what is quantised in them
gguf_file         the format of GGUF
gguf_weights      the weights of a folder in GGUF
derived/          weights computed from others: of other names, rows, numbers or bits
random_weights    weights without a file
tensor_source     what all of these have in common
stored_tensor     a weight as it is stored
stored_formats    its values: floats, and groups of integers with their scales
key_scales        powers of two that make channels of keys about equally large
arithmetic        what products are computed in, for the fingerprint
rope              angles of rotary positions

Decisions:

Large channels of keys are divided by powers of two before they are stored in a byte. The numbers of
a token and head share a scale, and in families with biases on their keys (Qwen2, ERNIE-4.5 with
biases) a few channels are many times larger than the rest: without it the perplexity of
Qwen2.5-Coder-0.5B rises by 3.8 %. The keys of a rotary pair are divided, and the queries
multiplied, by a power of two that follows from the layer's weights alone
(`engine/runner/weights/key_scales.py`), so it is the same for every token and node, and the product
of a query and a key keeps every bit. The factors are applied where the rotation is, at no cost.
Only int8 caches of such families have them, and the fingerprint covers them.
"""
