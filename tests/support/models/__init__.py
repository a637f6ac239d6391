"""Small models: checkpoints made in no time, runners on them, and a slow reference.

byte_kernels       the products with int8 rows that tests compile
demo_digests       digests of the demo model's logits
draws              single draws, and what they must be
fused_experts      experts of a layer in one tensor, in every form of files
hub_formats        models in GPTQ, AWQ, fp8 and compressed-tensors
mtp_running        sequences that decode on a runner with an MTP layer
odd_models         folders of models that are odd in one way
packing            weights of every stored format, packed for the kernels
pressure           models on pools too small for what they serve
reference_decoder  the decoder in float64, written from the papers
running            runners on tiny checkpoints, and their logits
tiny_checkpoints   random checkpoints of every family
tiny_gguf          GGUF files in any formats
tiny_model         a random Llama as a folder, one token per ASCII byte
tokenizer_gguf     a GGUF file written by the package `gguf`
"""
