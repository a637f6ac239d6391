"""The planning process: `python -m router.api.planning.child FOLDER NAME MAX_MODEL_LEN CHAT`.

It reads bodies from its standard input and writes plans or errors to its standard output, one after
the other; see `messages`. It ends at the end of its input and, also while it is stopped,
when its router dies, so it never outlives its router. It ends by no signal that a terminal or a
service's stop sends to a whole group: a router that drains still plans what has arrived.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from common.child_process import begin_helper
from common.errors import InvalidRequest, PdserveError
from common.files.kept_files import KeptFiles
from router.api.planning.messages import (
    LENGTHS,
    Message,
    pack_error,
    pack_message,
    pack_plan,
    unpack_request,
)
from router.api.planning.planner import Planner
from router.http.errors import ModelNotFound
from router.text.chat.conversation import ChatSettings
from router.text.text_model import TextModel


def replies_to(request: Message, model: TextModel) -> Iterable[Message]:
    """Return the messages that answer a request. Raises nothing."""
    kind, max_model_len, body = unpack_request(request)
    planner = Planner(model, max_model_len, lambda: secrets.randbits(64))
    try:
        return list(pack_plan(planner.plan(kind, body)))
    except (InvalidRequest, ModelNotFound) as error:
        return [pack_error(error)]
    except Exception as error:
        return [pack_error(error, traceback.format_exc())]


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


def serve(requests: BinaryIO, replies: BinaryIO, model: TextModel) -> None:
    """Answer every request, until the input ends or nobody reads the output."""
    with suppress(BrokenPipeError):
        while (request := read_message(requests)) is not None:
            for reply in replies_to(request, model):
                replies.writelines(pack_message(reply))
            del request, reply  # not kept while it waits for the next
            replies.flush()


def main(arguments: Sequence[str]) -> int:
    """Load the model's text side, then serve; return the exit code."""
    begin_helper()
    # Nothing else that is printed may come between the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    folder, name, max_model_len, settings_json = arguments
    settings = json.loads(settings_json)
    chat, files = ChatSettings(**settings["chat"]), KeptFiles(settings["files"])
    try:
        model = TextModel.load(Path(folder), name, int(max_model_len), chat, files)
    except PdserveError as error:
        sys.stderr.write(f"planning process: {error}\n")
        return 1
    gc.freeze()
    serve(sys.stdin.buffer, replies, model)
    # Without the interpreter's own end: nothing is left to flush, and a pipe may be broken.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
