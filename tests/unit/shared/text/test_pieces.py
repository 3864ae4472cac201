"""Bytes of tokens, compared with what the tokenizers' own decoders do."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.domain.ids import TokenId
from shared.text.detokenizer import Detokenizer
from shared.text.pieces import byte_level_alphabet, token_pieces


def _sentencepiece() -> Tokenizer:
    """A tiny tokenizer of the Llama kind: blanks as U+2581, lone bytes, one blank in front of the text."""
    words = ["<unk>", "<s>", "▁red", "▁green", "▁blue", "▁sky", "▁is", "<0xE6>", "<0xB0>", "<0xB4>"]
    tokenizer: Any = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def _description(tokenizer: Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())


def test_the_byte_level_alphabet_is_the_library_s() -> None:
    """256 characters, the same as the library knows, each for one byte."""
    alphabet = byte_level_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a 人\n")[0][0]
    assert bytes(alphabet[each] for each in written) == "a 人\n".encode()


def test_sentencepiece_words_keep_their_blanks() -> None:
    """TXT-03: one by one, the words read as the tokenizer's own decode of all of them."""
    tokenizer = _sentencepiece()
    pieces = token_pieces(_description(tokenizer))
    answer = [TokenId(each) for each in (2, 3, 4)]
    detokenizer = Detokenizer(pieces, strips_leading_blank=pieces.strips_leading_blank)
    assert "".join(detokenizer.feed([each]).text for each in answer) == "red green blue"
    assert tokenizer.decode(answer) == "red green blue"


def test_sentencepiece_bytes_make_a_character() -> None:
    """Lone bytes join to the character that they are."""
    pieces = token_pieces(_description(_sentencepiece()))
    detokenizer = Detokenizer(pieces)
    assert [detokenizer.feed([TokenId(each)]).text for each in (7, 8, 9)] == ["", "", "水"]


def test_special_and_silent_and_unknown_ids_have_no_text() -> None:
    """The begin token, an end id, and an id beyond the table."""
    pieces = token_pieces(_description(_sentencepiece()), silent_ids=[2])
    assert [pieces(TokenId(each)) for each in (1, 2, 3, 999, -1)] == [b"", b"", b" green", b"", b""]


def test_added_text_that_is_not_special_is_text() -> None:
    """An added token is written as itself in a byte-level vocabulary."""
    alphabet = {character: place for place, character in enumerate(sorted(byte_level_alphabet()))}
    tokenizer: Any = Tokenizer(models.BPE(alphabet, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("two words é", special=False)])
    assert token_pieces(_description(tokenizer))(TokenId(256)) == "two words é".encode()


def test_metaspace_and_unigram() -> None:
    """The other SentencePiece form: scores instead of merges, the blank dropped unless told not to."""
    tokenizer = Tokenizer(models.Unigram([("▁a", 0.0), ("b", -1.0)], unk_id=None, byte_fallback=False))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    pieces = token_pieces(_description(tokenizer))
    assert ([pieces(TokenId(0)), pieces(TokenId(1))], pieces.strips_leading_blank) == ([b" a", b"b"], True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    assert token_pieces(_description(tokenizer)).strips_leading_blank is False


def test_another_family_is_refused() -> None:
    """A decoder that we do not know would give wrong text without saying so."""
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        token_pieces(_description(tokenizer))
