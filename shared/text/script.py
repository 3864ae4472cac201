"""The JSON script that takes the model's place when the system runs scripted.

A script is `{"pieces": ["text", {"hex": "e4ba"}], "repeat": 1, "prefill_ms": 0, "step_ms": 0, "eos": true, "fail_at":
null}`; only `pieces` is required. Its UTF-8 bytes are the prompt, one token a byte, so whoever holds the prompt can
rebuild the table of token ids: 0-255 are bytes, 256 + k is the k-th distinct piece in order of first appearance (a
one-byte piece too gets an id of its own), and one fixed id beyond all pieces ends the answer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId

SCRIPTED_WINDOW = 1_000_000  # tokens, prompt and answer together
FIRST_PIECE_ID = 256
SCRIPTED_EOS_ID = TokenId(
    FIRST_PIECE_ID + SCRIPTED_WINDOW
)  # a script has fewer pieces than bytes, so no piece gets here
SCRIPTED_VOCAB_SIZE = SCRIPTED_EOS_ID + 1

MAX_REPEAT = SCRIPTED_WINDOW  # a longer answer cannot be asked for
MAX_PREFILL_MS = 3_600_000.0  # an hour: longer than any test waits
MAX_STEP_MS = 60_000.0  # above the 10 s after which a busy step counts as stalled, so that a stall can be scripted

_FIELDS = ("pieces", "repeat", "prefill_ms", "step_ms", "eos", "fail_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A valid script. Output tokens are numbered from 1.

    `pieces` is played `repeat` times; then come end-of-answer ids without end, or, with `eos` false, the pieces again
    without end: the answer then ends by `max_tokens` or a stop string. At token `fail_at` the engine raises.
    """

    pieces: tuple[bytes, ...]
    repeat: int = 1
    prefill_ms: float = 0.0
    step_ms: float = 0.0
    eos: bool = True
    fail_at: int | None = None
    piece_table: tuple[bytes, ...]
    """Bytes of the token ids 256, 257, ..."""
    piece_ids: tuple[TokenId, ...]
    """Token id of each entry of `pieces`."""

    @staticmethod
    def parse(source: bytes | str) -> "Script":
        """Read a script; ServingError INVALID_REQUEST with one sentence that names what is wrong."""
        fields = _read_object(source)
        unknown = sorted(set(fields) - set(_FIELDS))
        if unknown:
            raise _refused(f"field {unknown[0][:64]!r} is not known; known are {', '.join(_FIELDS)}")
        eos = _boolean(fields, "eos", default=True)
        pieces = _pieces(fields)
        if not pieces and not eos:
            raise _refused("'pieces' must not be empty when 'eos' is false")
        ids: dict[bytes, TokenId] = {}
        for piece in pieces:
            ids.setdefault(piece, TokenId(FIRST_PIECE_ID + len(ids)))
        return Script(
            pieces=pieces,
            repeat=_whole_number(fields, "repeat", default=1, low=0, high=MAX_REPEAT),
            prefill_ms=_milliseconds(fields, "prefill_ms", MAX_PREFILL_MS),
            step_ms=_milliseconds(fields, "step_ms", MAX_STEP_MS),
            eos=eos,
            fail_at=None
            if fields.get("fail_at") is None
            else _whole_number(fields, "fail_at", default=1, low=1, high=SCRIPTED_WINDOW),
            piece_table=tuple(ids),
            piece_ids=tuple(ids[piece] for piece in pieces),
        )

    @staticmethod
    def from_prompt(prompt_ids: Sequence[TokenId]) -> "Script":
        """The script whose bytes are the prompt's ids; raises as `parse` does."""
        try:
            source = bytes(prompt_ids)
        except ValueError:
            raise _refused("a prompt token is not a byte") from None
        return Script.parse(source)

    @property
    def num_scripted_tokens(self) -> int:
        """Pieces in the whole answer, without the end."""
        return len(self.pieces) * self.repeat

    def token_id(self, index: int) -> TokenId:
        """Output token `index` (from 1), in constant time."""
        if index < 1:
            raise ValueError("output tokens are numbered from 1")
        if self.eos and index > self.num_scripted_tokens:
            return SCRIPTED_EOS_ID
        return self.piece_ids[(index - 1) % len(self.piece_ids)]

    def output_ids(self) -> Iterator[TokenId]:
        """All output tokens from 1 on, lazily and without end."""
        index = 1
        while True:
            yield self.token_id(index)
            index += 1

    def token_bytes(self, token_id: TokenId) -> bytes:
        """The bytes of a token; none for the end id. Raises ValueError for an id that this script does not have."""
        if 0 <= token_id < FIRST_PIECE_ID:
            return bytes((token_id,))
        if token_id == SCRIPTED_EOS_ID:
            return b""
        place = token_id - FIRST_PIECE_ID
        if not 0 <= place < len(self.piece_table):
            raise ValueError(f"token id {token_id} is not in the script's table")
        return self.piece_table[place]


def _refused(problem: str) -> ServingError:
    return ServingError(ErrorCode.INVALID_REQUEST, f"script: {problem}", param="messages")


def _read_object(source: bytes | str) -> Mapping[str, object]:
    try:
        text = source.decode("utf-8") if isinstance(source, bytes) else source
        value: object = json.loads(text)
    except UnicodeDecodeError:
        raise _refused("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _refused(f"it is not JSON ({error.msg} at character {error.pos})") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets nested thousands deep
        raise _refused("it is not JSON that can be read here (a number too long or nesting too deep)") from None
    if not isinstance(value, dict):
        raise _refused("it must be a JSON object")
    return cast("dict[str, object]", value)


def _pieces(fields: Mapping[str, object]) -> tuple[bytes, ...]:
    if "pieces" not in fields:
        raise _refused("'pieces' is missing")
    value = fields["pieces"]
    if not isinstance(value, list):
        raise _refused("'pieces' must be a list")
    return tuple(_piece(place, item) for place, item in enumerate(cast("list[object]", value)))


def _piece(place: int, item: object) -> bytes:
    if isinstance(item, str):
        try:
            return item.encode("utf-8")
        except UnicodeEncodeError:
            raise _refused(f"pieces[{place}] holds half of a surrogate pair, which has no UTF-8 bytes") from None
    if isinstance(item, dict):
        entry = cast("dict[str, object]", item)
        digits = entry.get("hex")
        if set(entry) == {"hex"} and isinstance(digits, str):
            try:
                return bytes.fromhex(digits)
            except ValueError:
                raise _refused(f"pieces[{place}] has a 'hex' that is not pairs of hexadecimal digits") from None
    raise _refused(f'pieces[{place}] must be a string or {{"hex": "..."}}')


def _boolean(fields: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise _refused(f"'{name}' must be true or false")
    return value


def _whole_number(fields: Mapping[str, object], name: str, *, default: int, low: int, high: int) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refused(f"'{name}' must be a whole number from {low} to {high}")
    return value


def _milliseconds(fields: Mapping[str, object], name: str, high: float) -> float:
    value = fields.get(name, 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
        raise _refused(f"'{name}' must be a number from 0 to {high:g}")
    return float(value)
