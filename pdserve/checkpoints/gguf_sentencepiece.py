"""A SentencePiece BPE vocabulary of a GGUF file (`tokenizer.ggml.model` "llama") as a tokenizer.

SentencePiece joins the two neighbours that make the piece with the highest score, and again until
none is left; a merge list in the order of the scores does the same.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers

from common.errors import CheckpointError
from engine.runner.weights.gguf_file import GgufFile

# Token types of the GGUF specification.
_NORMAL = 1
_BYTE = 6

_SPACE = "▁"


def sentencepiece_tokenizer(
    gguf: GgufFile, vocabulary: dict[str, int], token_types: list[int]
) -> Tokenizer:
    """Return the tokenizer without its special tokens; `token_types` is by token id.

    Raises CheckpointError when scores or byte pieces are missing, or the text is to be normalised.
    """
    _refuse_normalisation(gguf)
    scores = gguf.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        raise CheckpointError(f"{gguf.path}: {len(scores)} scores for {len(vocabulary)} tokens")
    for value in range(256):
        token_id = vocabulary.get(f"<0x{value:02X}>")
        if token_id is None or token_types[token_id] != _BYTE:
            raise CheckpointError(
                f"{gguf.path}: no byte token <0x{value:02X}>: wanted one for each of 256 bytes"
            )
    pieces = {piece: i for piece, i in vocabulary.items() if token_types[i] == _NORMAL}
    # With a token for each byte no text is unknown, so there is no use for the unknown token.
    merges = merges_of_scores(pieces, scores)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    has_space_prefix = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_of_scores(pieces: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all ways to make one of `pieces` (text → id) of two others, the best score first.

    Equal scores are ordered by the longer left part, then the longer right part, then by the ids of
    the piece and of its parts. `scores` is by id.
    """
    ranked = []
    for piece, piece_id in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ids = (piece_id, pieces[left], pieces[right])
                ranked.append(((-scores[piece_id], -len(left), -len(right), *ids), left, right))
    return [(left, right) for _, left, right in sorted(ranked)]


def _refuse_normalisation(gguf: GgufFile) -> None:
    if gguf.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.remove_extra_whitespaces is set: supported is false"
        )
    if gguf.metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise CheckpointError(
            f"{gguf.path}: tokenizer.ggml.precompiled_charsmap is given: supported is none"
        )
