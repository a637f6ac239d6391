"""`guidellm` in its default settings: chats that stream, with usage in every event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_, port, tokenizer = sys.argv
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 32, 16

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    command = [
        str(Path(sys.executable).with_name("guidellm")),
        "run",
        *("--backend", f"kind=openai_http,target=http://127.0.0.1:{port}"),
        *("--profile", "kind=synchronous"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        *("--output", f"kind=json,path={report}"),
        "--disable-console-interactive",
    ]
    # The tokenizer is a folder; nothing is asked of a hub.
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}, timeout=280)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]

requests = benchmark["requests"]
assert not requests["errored"], requests["errored"]
assert not requests["incomplete"], requests["incomplete"]
assert len(requests["successful"]) == NUM_REQUESTS
for request in requests["successful"]:
    metrics = request["output_metrics"]
    assert metrics["text_tokens"] == OUTPUT_TOKENS, request
