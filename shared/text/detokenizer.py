"""Tokens into text, bit by bit: no broken character, no part of a stop string, nothing lost at the end.

All work is on bytes until a character is whole. The joined text of all emissions and the flush is what decoding all
bytes at once gives, however the tokens are cut, up to a stop string.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.domain.ids import TokenId
from shared.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Emission:
    """New text, fit to be shown. `stop_index` is set once: the number of the token that completed a stop string."""

    text: str
    stop_index: int | None = None


class Detokenizer:
    """One answer's text. Tokens are numbered from 1 in the order in which they are fed.

    Held back: the bytes of a character that is not whole yet, and text that may become a stop string. After a stop
    string was found nothing more comes out. The cost of a token is that of its own text, not of the answer so far.
    """

    __slots__ = ("_decoder", "_has_stopped", "_num_fed", "_stops", "_strips_blank", "_token_bytes")

    def __init__(
        self,
        token_bytes: Callable[[TokenId], bytes],
        stop: Sequence[str] = (),
        *,
        strips_leading_blank: bool = False,
    ) -> None:
        """`stop` holds non-empty strings; `strips_leading_blank` drops one blank if the text starts with it."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(stop)
        self._strips_blank = strips_leading_blank
        self._num_fed = 0
        self._has_stopped = False

    @property
    def num_fed(self) -> int:
        """Tokens taken, up to and with the one that completed a stop string."""
        return self._num_fed

    @property
    def num_held_chars(self) -> int:
        """Whole characters that are held back, as they may become a stop string."""
        return self._stops.num_held

    def token_bytes(self, token_id: TokenId) -> bytes:
        """What a token stands for, wherever it stands; empty for special tokens and ends."""
        return self._token_bytes(token_id)

    def feed(self, token_ids: Sequence[TokenId]) -> Emission:
        """Take the next tokens; what follows a completed stop string is ignored."""
        texts: list[str] = []
        for token_id in token_ids:
            if self._has_stopped:
                break
            self._num_fed += 1
            piece = self._token_bytes(token_id)
            if self._strips_blank and piece:
                piece = piece.removeprefix(b" ")
                self._strips_blank = False
            text = self._decoder.decode(piece)
            if not text:
                continue
            shown, self._has_stopped = self._stops.feed(text)
            texts.append(shown)
            if self._has_stopped:
                return Emission("".join(texts), self._num_fed)
        return Emission("".join(texts))

    def flush(self) -> str:
        """The answer has ended: release what was held, with at most one U+FFFD for a character that was cut."""
        if self._has_stopped:
            return ""
        self._has_stopped = True
        return self._stops.release() + self._decoder.decode(b"", True)
