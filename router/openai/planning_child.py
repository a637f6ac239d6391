"""The planning process: `python -m router.openai.planning_child FOLDER NAME MAX_MODEL_LEN CHAT`.

It reads bodies from its standard input and writes plans or errors to its standard output, one after
the other; see `planning_messages`. It ends at the end of its input and, also while it is stopped,
when its router dies, so it never outlives its router. It ends by no signal that a terminal or a
service's stop sends to a whole group: a router that drains still plans what has arrived.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import CheckpointError, InvalidRequest, PdserveError
from common.grammar import Grammar
from grammars.compiler import GrammarCompiler
from grammars.parts import GrammarParts
from router.http.errors import ModelNotFound
from router.openai.planning_messages import (
    LENGTHS,
    Message,
    pack_error,
    pack_message,
    pack_plan,
    unpack_request,
)
from router.openai.request_plan import Planner
from router.text.conversation import ChatSettings
from router.text.text_model import TextModel

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "900"
"""Where memory runs out, the kernel ends this process before the router, which starts another."""


def replies_to(
    request: Message, model: TextModel, check: Callable[[Grammar, GrammarParts], None]
) -> Iterable[Message]:
    """Return the messages that answer a request. Raises nothing.

    `check` raises `InvalidRequest` for a grammar that does not compile.
    """
    kind, max_model_len, body = unpack_request(request)
    planner = Planner(model, max_model_len, lambda: secrets.randbits(64), check=check)
    try:
        return list(pack_plan(planner.plan(kind, body)))
    except (InvalidRequest, ModelNotFound) as error:
        return [pack_error(error)]
    except Exception as error:
        return [pack_error(error, traceback.format_exc())]


class GrammarCheck:
    """Compiles grammars for a model, whose tokenizer it reads for the first of them."""

    def __init__(self, folder: Path, model: TextModel) -> None:
        self._folder = folder
        self._model = model
        self._compiler: GrammarCompiler | None = None

    def check(self, grammar: Grammar, parts: GrammarParts) -> None:
        """Raise `InvalidRequest`, with the part at fault, for what cannot be followed."""
        if self._compiler is None:
            self._compiler = self._load(grammar)
        if self._compiler is None:
            raise InvalidRequest(
                f"model {self._model.name!r} has no end-of-sequence token, which grammars need",
                param=grammar.source or None,
            )
        self._compiler.check(grammar, parts)

    def _load(self, grammar: Grammar) -> GrammarCompiler | None:
        model = self._model
        try:
            return GrammarCompiler.load(self._folder, model.vocab_size, model.eos_token_ids)
        except CheckpointError as error:
            raise InvalidRequest(
                f"the tokenizer of model {model.name!r} cannot be used for grammars: {error}",
                param=grammar.source or None,
            ) from error


def read_message(source: BinaryIO) -> Message | None:
    """Return the next message, or None at the end of the input, even within a message."""
    lengths = source.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head_bytes, rest_bytes = LENGTHS.unpack(lengths)
    head, rest = source.read(head_bytes), source.read(rest_bytes)
    if len(head) < head_bytes or len(rest) < rest_bytes:
        return None
    return Message(json.loads(head), rest)


def serve(
    requests: BinaryIO,
    replies: BinaryIO,
    model: TextModel,
    check: Callable[[Grammar, GrammarParts], None],
) -> None:
    """Answer every request, until the input ends or nobody reads the output."""
    with suppress(BrokenPipeError):
        while (request := read_message(requests)) is not None:
            for reply in replies_to(request, model, check):
                replies.writelines(pack_message(reply))
            del request, reply  # not kept while it waits for the next
            replies.flush()


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, where it can (Linux).

    A parent that died before is noticed by the end of the input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: Sequence[str]) -> int:
    """Load the model's text side, then serve; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    # Nothing else that is printed may come between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    folder, name, max_model_len, settings = arguments
    chat = ChatSettings(**json.loads(settings))
    try:
        model = TextModel.load(Path(folder), name, int(max_model_len), chat)
    except PdserveError as error:
        sys.stderr.write(f"planning process: {error}\n")
        return 1
    gc.freeze()
    serve(sys.stdin.buffer, replies, model, GrammarCheck(Path(folder), model).check)
    # Without the interpreter's own end: nothing is left to flush, and a pipe may be broken.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
