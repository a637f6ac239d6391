"""`aiperf` with streams, the server's token counts, and usage in every event."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

port, tokenizer = sys.argv[1], Path(sys.argv[2])
NUM_REQUESTS, OUTPUT_TOKENS = 6, 16

with tempfile.TemporaryDirectory() as folder:
    command = [
        str(Path(sys.executable).with_name("aiperf")),
        "profile",
        *("--model", tokenizer.name, "--url", f"http://127.0.0.1:{port}"),
        *("--endpoint-type", "chat", "--streaming"),
        *("--use-server-token-count", "--per-chunk-usage"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "2"),
        *("--isl", "32", "--osl", str(OUTPUT_TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--tokenizer", str(tokenizer)),
        *("--artifact-dir", folder, "--ui", "none"),
    ]
    # The tokenizer is a folder, which it reads as one only where a hub may be asked.
    subprocess.run(command, check=True, timeout=280)
    (report,) = Path(folder).rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())

assert found["request_count"]["avg"] == NUM_REQUESTS, found
assert not (found.get("error_request_count") or {}).get("avg"), found
assert found["output_sequence_length"]["avg"] == OUTPUT_TOKENS, found
