"""The parameters of a decoder, read from config.json.

model_spec        all of them, for every family
rope_spec         those of rotary positions
sliding_windows   which layers attend to a window of positions
expert_mixture    layers with a mixture of experts
multipliers       those of Granite
decoder_tensors   the names and shapes of its tensors
config_values     values of a config file, checked as they are read
"""
