"""The exact bytes of every token, read from a tokenizer's own description (the content of `tokenizer.json`).

Decoding with the tokenizer itself joins strings, and a string cannot hold a third of a character; bytes can. Two
families are known: byte-level BPE (GPT-2 and its kin), whose vocabulary writes each byte as one printable character,
and the SentencePiece kin, whose vocabulary writes a blank as U+2581 and a lone byte as `<0xNN>`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from shared.domain.ids import TokenId

_BLANK = "\u2581"
_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPieces:
    """Bytes by token id. Special tokens have none, and so have ids that the tokenizer does not know."""

    pieces: tuple[bytes, ...]
    strips_leading_blank: bool
    """Whether a text's first blank is the tokenizer's own mark and no part of the text."""

    def __call__(self, token_id: TokenId) -> bytes:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""


def token_pieces(description: Mapping[str, Any], silent_ids: Collection[int] = ()) -> TokenPieces:
    """Read the bytes of all tokens from the parsed `tokenizer.json`; `silent_ids` (the ends of an answer) get none.

    Raises ValueError with one sentence for a tokenizer of another family.
    """
    decoders = list(_decoders(description.get("decoder")))
    kinds = {decoder["type"] for decoder in decoders}
    texts = _vocabulary(description["model"])
    if "ByteLevel" in kinds:
        alphabet = byte_level_alphabet()
        by_id = {token_id: _byte_level_bytes(text, alphabet) for token_id, text in texts.items()}
        strips = False
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        by_id = {token_id: _sentencepiece_bytes(text) for token_id, text in texts.items()}
        strips = any(_strips_first_blank(decoder) for decoder in decoders)
    else:
        raise ValueError(f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported")
    for added in description.get("added_tokens") or ():
        by_id[added["id"]] = b"" if added["special"] else added["content"].encode("utf-8")
    for token_id in silent_ids:
        by_id[token_id] = b""
    pieces = [b""] * (max(by_id, default=-1) + 1)
    for token_id, piece in by_id.items():
        pieces[token_id] = piece
    return TokenPieces(pieces=tuple(pieces), strips_leading_blank=strips)


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Bytes that are printable in Latin-1 stand for themselves; the others are counted off from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(hidden)})
    return alphabet


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _decoders(inner)
    else:
        yield decoder


def _vocabulary(model: Mapping[str, Any]) -> dict[int, str]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):  # BPE: text to id
        return {token_id: text for text, token_id in cast("dict[str, int]", vocabulary).items()}
    if isinstance(vocabulary, list):  # Unigram: (text, score) by id
        return {place: text for place, (text, _) in enumerate(cast("list[tuple[str, float]]", vocabulary))}
    raise ValueError("the tokenizer has no vocabulary")


def _byte_level_bytes(text: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[character] for character in text])
    except KeyError:  # a token that was put into the vocabulary as plain text
        return text.encode("utf-8")


def _sentencepiece_bytes(text: str) -> bytes:
    lone = _LONE_BYTE.fullmatch(text)
    return bytes((int(lone[1], 16),)) if lone else text.replace(_BLANK, " ").encode("utf-8")


def _strips_first_blank(decoder: Mapping[str, Any]) -> bool:
    match decoder["type"]:
        case "Strip":
            return decoder["content"] == " " and decoder["start"] > 0
        case "Metaspace":
            return decoder.get("prepend_scheme", "always") != "never"
        case _:
            return False
