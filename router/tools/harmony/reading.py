"""The parts of an answer in harmony, and the tokens of its thinking."""

from __future__ import annotations

from collections.abc import Iterator

from router.tools.harmony.message_cut import MessageCut, Piece, PieceKind
from router.tools.harmony.tags import CHANNEL, START
from router.tools.json_extent import JsonArguments
from router.tools.parts import CallArguments, CallStart, Part, TextPart, ThinkingPart
from router.tools.thinking import LeadingSpace


class HarmonyParser:
    """Parses one answer, whatever pieces it comes in."""

    def __init__(self, cut: MessageCut, *, thinks: bool) -> None:
        """Begin an answer, which `cut` cuts. Without `thinks`, what it thinks is text."""
        self._cut = cut
        self._thinks = thinks
        self._seen: set[PieceKind] = set()
        """The kinds that have text."""
        self._arguments = JsonArguments()
        self._behind_call = LeadingSpace()
        self._has_text_behind = False
        self.num_calls = 0
        self._is_open = self._is_cut_short = False
        """Whether the arguments of the last call, and those of one before it, are not whole."""

    @property
    def ends_in_calls(self) -> bool:
        """Whether what was pushed holds calls, and none that has begun and is not whole."""
        is_begun = self._is_open or self._is_cut_short or self._cut.is_before_call
        return self.num_calls > 0 and not is_begun

    @property
    def is_in_arguments(self) -> bool:
        """Whether the arguments of the last call are not whole."""
        return self._is_open

    def push(self, text: str, *, is_last: bool = False) -> Iterator[Part]:
        """Add text; yield the parts that are certain now, and with `is_last` all that is left."""
        for piece in self._cut.push(text, is_last=is_last):
            yield from self._parts_of(piece)

    def _parts_of(self, piece: Piece) -> Iterator[Part]:
        match piece.kind:
            case PieceKind.CALL:
                yield from self._call(piece)
            case PieceKind.THOUGHT if self._thinks:
                if piece.text:
                    is_apart = self._is_apart(PieceKind.THOUGHT, piece.begins)
                    yield ThinkingPart(piece.text, is_apart)
            case PieceKind.THOUGHT | PieceKind.TEXT:
                if piece.text:
                    yield TextPart(piece.text, self._is_apart(PieceKind.TEXT, piece.begins))

    def _is_apart(self, kind: PieceKind, begins: bool) -> bool:
        """Return whether text of a kind is in another message than that before it."""
        is_apart = begins and kind in self._seen
        self._seen.add(kind)
        return is_apart

    def _call(self, piece: Piece) -> Iterator[Part]:
        if piece.begins:
            yield CallStart(self.num_calls, piece.function)
            self.num_calls += 1
            self._arguments, self._behind_call = JsonArguments(), LeadingSpace()
            self._is_cut_short |= self._is_open
            self._is_open, self._has_text_behind = bool(piece.text), False
        if not piece.text:
            yield CallArguments(self.num_calls - 1, "{}")
            return
        if self._is_open:
            taken, end = self._arguments.take(piece.text)
            self._is_open = not self._arguments.is_over
            yield CallArguments(self.num_calls - 1, taken)
        else:
            end = 0
        behind = piece.text[end:]
        if not self._has_text_behind:
            behind = self._behind_call.push(behind)
        if behind:
            is_apart = self._is_apart(PieceKind.TEXT, not self._has_text_behind)
            yield TextPart(behind, is_apart)
            self._has_text_behind = True


class AnalysisTokens:
    """Counts the tokens of an answer's thinking, those of its headers and ends among them.

    Text comes one token at a time: a group of tokens may hold the end of a message.
    """

    def __init__(self, cut: MessageCut) -> None:
        """Begin an answer, which `cut` cuts."""
        self._cut = cut
        self._num_undecided = 0
        """The tokens of a header whose channel is not known yet."""
        self.num = 0

    @property
    def is_over(self) -> bool:
        """Whether the number is final: a message of thinking may always follow."""
        return False

    def push(self, text: str) -> None:
        """Add the text that a token made certain, which may be ''."""
        before = self._cut.kind
        self._cut.push(text)
        after = self._cut.kind
        if before is PieceKind.THOUGHT:
            self.num += 1
        elif after is PieceKind.THOUGHT:
            self.num += self._num_undecided + 1
            self._num_undecided = 0
        elif after is not None:
            self._num_undecided = 0
        elif before is None:
            self._num_undecided += 1
        else:
            self._num_undecided = int(text in (START, CHANNEL))  # another one ends its message
