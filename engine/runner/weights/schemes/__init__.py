"""Weights of safetensors that are quantised already: GPTQ, AWQ, fp8 and compressed-tensors.

quantization_config  what config.json says of them
scheme_weights       such a folder's weights
scheme               how one of them is stored in several tensors
integer_schemes      GPTQ, AWQ and compressed-tensors
integer_formats      their integers in a format that the kernels have
float8_scheme        fp8
"""
