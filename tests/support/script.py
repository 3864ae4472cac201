"""Scripts for the deterministic generator: what the answer will be is known before it is asked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEFAULTS: dict[str, Any] = {"repeat": 1, "prefill_ms": 0, "step_ms": 0, "eos": True, "fail_at": None}
Piece = str | bytes
"""One token: text, or bytes that need not be whole characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Each piece is one token; the list is played `repeat` times."""

    pieces: Sequence[Piece]
    repeat: int = 1
    prefill_ms: int = 0
    step_ms: int = 0
    eos: bool = True
    fail_at: int | None = None

    @property
    def message(self) -> str:
        """The user message that plays this script; what is not said is the generator's default."""
        pieces = [piece if isinstance(piece, str) else {"hex": piece.hex()} for piece in self.pieces]
        settings = {
            "repeat": self.repeat,
            "prefill_ms": self.prefill_ms,
            "step_ms": self.step_ms,
            "eos": self.eos,
            "fail_at": self.fail_at,
        }
        said = {name: value for name, value in settings.items() if value != DEFAULTS[name]}
        return json.dumps({"pieces": pieces, **said})

    @property
    def num_prompt_tokens(self) -> int:
        """A scripted prompt is the bytes of its message, one token each."""
        return len(self.message.encode())

    @property
    def num_pieces(self) -> int:
        return len(self.pieces) * self.repeat

    def text(self, num_tokens: int | None = None) -> str:
        """What the first `num_tokens` pieces spell (all of them by default); a cut character becomes U+FFFD."""
        played = (list(self.pieces) * self.repeat)[:num_tokens]
        joined = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in played)
        return joined.decode("utf-8", errors="replace")

    def body(self, **parameters: Any) -> dict[str, Any]:
        """A chat completion body that plays this script, with room for all its pieces and the end token by default."""
        messages = [{"role": "user", "content": self.message}]
        return {"model": "default", "messages": messages, "max_tokens": self.num_pieces + 1, **parameters}


def counting(num_pieces: int, **settings: Any) -> Script:
    """A script of distinct numbered words: a lost, doubled or swapped token shows."""
    return Script(pieces=[f"w{i} " for i in range(num_pieces)], **settings)


def padded(script_pieces: Sequence[str], *, num_prompt_tokens: int, **settings: Any) -> Script:
    """A script whose prompt has exactly this many tokens: the last piece is lengthened. Raises ValueError if too short."""
    last = script_pieces[-1]
    missing = num_prompt_tokens - Script(pieces=script_pieces, **settings).num_prompt_tokens
    if missing < 0:
        raise ValueError(f"the script alone needs {-missing} tokens more")
    return Script(pieces=[*script_pieces[:-1], last + "." * missing], **settings)
