"""Token ids of a text, from a process of its own.

    python -m bench.engine.encoded_text FOLDER < TEXT

A measured process that only computes then has no tokenizer in its memory, like a node.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def encoded_elsewhere(folder: Path, text: str) -> list[int]:
    """Return the ids of `text` for the model in `folder`, without special tokens."""
    command = [sys.executable, "-m", "bench.engine.encoded_text", str(folder)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    ids: list[int] = json.loads(done.stdout)
    return ids


def main() -> None:
    # Imported late: the process that asks must not have it.
    from router.text.text_model import TextModel

    model = TextModel.load(Path(sys.argv[1]), "", 0)
    print(json.dumps(list(model.encode(sys.stdin.read(), add_special_tokens=False, param="text"))))


if __name__ == "__main__":
    main()
