"""Distil a multi-token-prediction (MTP) layer for a model from the model's own answers.

The layer drafts tokens for speculative decoding (`--speculative-method mtp`). In three phases:

  1. the model writes user messages, which join a bank of short questions and instructions;
  2. it answers them greedily, and its last hidden states are kept with the tokens;
  3. one decoder layer learns to draft the next tokens from hidden state and token, and from its
     own output for the drafts after the first.

With the default sizes all of it takes under an hour on two idle CPU cores, and at most 4 GB of
memory. Progress is kept in the work folder: when stopped, start it again and it continues, with
other numbers of tokens or steps too. From the third phase on the weights are written to
--output every hundred steps, with a line that says which part of first, second and third drafts
would be accepted on conversations that were held out (the second counts where the first is right,
and so on).

    python -m tools.train_mtp --output demo_mtp.safetensors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.errors import PdserveError
from common.files.cache_folder import cache_root
from pdserve.checkpoints.resolve import resolve_checkpoint


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_mtp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="what to distil from: 'demo', a Hugging Face folder or a .gguf file (default: demo)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo_mtp.safetensors"),
        metavar="FILE",
        help="where the weights go, float16 safetensors (default: ./demo_mtp.safetensors)",
    )
    parser.add_argument(
        "--work-folder",
        type=Path,
        default=cache_root() / "train-mtp",
        metavar="FOLDER",
        help="where progress is kept, about 0.7 GB (default: train-mtp in pdserve's cache folder)",
    )

    def count(name: str, default: int, text: str) -> None:
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )

    count("--messages", 1200, "user messages that the model writes itself")
    count("--answer-tokens", 320_000, "tokens of answers to learn from")
    count("--steps", 1800, "optimizer steps; half an hour or so of two cores")
    count("--draft-vocabulary", 8192, "tokens that can be drafted, a multiple of 16")
    count("--seed", 0, "of all random choices")
    count("--num-threads", 0, "CPU threads, 0: all cores")
    return parser


def main() -> int:
    arguments = build_parser().parse_args()
    # Importing Paddle takes seconds; help and wrong flags are reported before.
    from tools.mtp_training.distil import Sizes, distil

    try:
        distil(
            resolve_checkpoint(arguments.model),
            arguments.work_folder,
            arguments.output,
            Sizes(
                num_messages=arguments.messages,
                answer_tokens=arguments.answer_tokens,
                num_steps=arguments.steps,
                draft_vocabulary=arguments.draft_vocabulary,
            ),
            seed=arguments.seed,
            num_threads=arguments.num_threads,
        )
    except PdserveError as error:
        print(f"train_mtp: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_mtp: stopped; start it again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
