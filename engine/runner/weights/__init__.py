"""The weights of a folder, checked before any is read.

model_spec        the parameters of a decoder
checkpoint        the weights of a folder in safetensors
gguf_file         the format of GGUF
gguf_weights      the weights of a folder in GGUF
quantised_source  weights that are quantised while they are loaded
random_weights    weights without a file
tensor_source     what all of these have in common
stored_tensor     a weight as it is stored
stored_formats    its values: floats, and blocks of integers with their scales
key_scales        powers of two that make channels of keys about equally large
arithmetic        what products are computed in, for the fingerprint
rope              angles of rotary positions
"""
