"""Writes what `transformers` answers greedily with a model: demo_reference.json, or another file.

    python make_reference.py MODEL_FOLDER FILE [TEXT]

MODEL_FOLDER is a model as `python -m pdserve.checkpoints.known_models NAME` makes it; an
environment with torch, transformers and gguf is needed. The beginning of the file TEXT is one more
prompt, a long one: qwen_coder_reference.json has that of the text in bench/texts. Each step keeps
the likeliest token, whatever it is (the end of sequence too), and notes by how much its logit
exceeds the second: where that margin is about the rounding of float32, another correct
implementation may choose the other token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 48
LONG_CHARACTERS = 5900
"""About 1,500 tokens of English."""
_COUNTING = " ".join(f"{number}," for number in range(1, 160))
PROMPTS: list[dict[str, str]] = [
    {"kind": "chat", "text": "What is the capital of France?"},
    {"kind": "chat", "text": "Write a haiku about the sea, then explain it in one sentence."},
    {"kind": "chat", "text": "Übersetze ins Englische: «Der Hund schläft – wo ist die Katze?» 🐈"},
    {"kind": "chat", "text": "Sort these numbers: 17, 3, 99, 4, 56, 23.\n\nShow every step."},
    {"kind": "completion", "text": "The"},
    {"kind": "completion", "text": "Once upon a time, in a village by the river, there lived"},
    {"kind": "completion", "text": "def fibonacci(n: int) -> int:\n    "},
    {"kind": "completion", "text": f"Count with me: {_COUNTING}"},
]


def main(model_folder: str, reference_path: str, text_path: str = "") -> None:
    """Compute every answer and write the file."""
    prompts = list(PROMPTS)
    if text_path:
        text = Path(text_path).read_text(encoding="utf-8")
        prompts.append({"kind": "completion", "text": text[:LONG_CHARACTERS]})
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, gguf_file="weights.gguf"
    ).eval()
    with torch.no_grad():
        answers = [answer(model, prompt, token_ids(tokenizer, prompt)) for prompt in prompts]
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in answers)
    Path(reference_path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def token_ids(tokenizer: Any, prompt: dict[str, str]) -> list[int]:
    """The prompt's tokens; a chat is rendered with the model's own template."""
    text = prompt["text"]
    if prompt["kind"] == "chat":
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answer(model: Any, prompt: dict[str, str], prompt_token_ids: list[int]) -> dict[str, Any]:
    """Prompt, tokens and margins of one greedy answer."""
    drawn: list[int] = []
    margins: list[float] = []
    cache, step = None, torch.tensor([prompt_token_ids])
    for _ in range(NUM_TOKENS):
        output = model(step, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].float().topk(2)
        drawn.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
        step = torch.tensor([[drawn[-1]]])
    return {
        **prompt,
        "prompt_token_ids": prompt_token_ids,
        "token_ids": drawn,
        "margins": margins,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
