"""The engine on a CPU, by itself: `python -m bench.engine`.

one_row_step      where the time of a step of one row goes
encoded_text      token ids of a text, from a process of its own
sampling          what a draw costs
memory_plan       how a node's memory is divided
llama_cpp_peer    llama.cpp, driven line by line
llama_cpp_logits  llama.cpp's logits of texts
transformers_peer transformers on PyTorch, driven line by line
"""
