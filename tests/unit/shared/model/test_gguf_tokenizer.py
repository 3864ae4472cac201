"""Tokenizers out of GGUF metadata: the cuts of each variant, and a sentence for what cannot be read."""

from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from shared.model.gguf_tokenizer import write_tokenizer
from shared.model.prepared import PreparationError
from shared.text.pieces import byte_level_alphabet


def _byte_level(pre: str, extra: tuple[str, ...] = (), merges: tuple[str, ...] = ()) -> dict[str, Any]:
    alphabet = [each for each, _ in sorted(byte_level_alphabet().items(), key=lambda entry: entry[1])]
    tokens = [*alphabet, *extra, "<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def _cut(fields: dict[str, Any], text: str, folder: Path) -> list[str]:
    write_tokenizer(fields, folder)
    tokenizer: Any = cast("Any", PreTrainedTokenizerFast).from_pretrained(str(folder), local_files_only=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text == tokenizer.decode(ids)
    return [fields["tokenizer.ggml.tokens"][token_id] for token_id in ids]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
    ],
)
def test_digits_are_cut_as_each_variant_does(pre: str, expected: list[str], tmp_path: Path) -> None:
    """What is cut apart first is never merged."""
    fields = _byte_level(pre, ("12", "34", "123", "1234"), ("1 2", "3 4", "12 3", "12 34"))

    assert expected == _cut(fields, "1234", tmp_path)


def test_blanks_lines_and_special_tokens(tmp_path: Path) -> None:
    """A blank goes with the word behind it, line ends together; a control token in a text is itself."""
    fields = _byte_level("llama-bpe", ("ĠĠ", "ĊĊ", "Ġa"), ("Ġ Ġ", "Ċ Ċ", "Ġ a"))

    assert ["ĠĠ", "Ġa", "ĊĊ", "b", "</s>"] == _cut(fields, "   a\n\nb</s>", tmp_path)


def test_a_word_that_is_a_token_is_taken_whole(tmp_path: Path) -> None:
    """For Llama 3 even where no merges lead to it."""
    fields = _byte_level("llama-bpe", ("abc",))

    assert ["abc"] == _cut(fields, "abc", tmp_path)
    assert ["a", "b", "c"] == _cut(fields | {"tokenizer.ggml.pre": "qwen2"}, "abc", tmp_path)


def test_qwen_composes_characters_first(tmp_path: Path) -> None:
    """An e with an accent of its own becomes the one character."""
    fields = _byte_level("qwen2")
    write_tokenizer(fields, tmp_path)
    tokenizer: Any = cast("Any", PreTrainedTokenizerFast).from_pretrained(str(tmp_path), local_files_only=True)

    assert list("é".encode()) == tokenizer("e\u0301", add_special_tokens=False)["input_ids"]


def _sentencepiece() -> dict[str, Any]:
    """Scores say which merge comes first, as SentencePiece's BPE has them; bytes for what is not in the vocabulary."""
    words = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -0.1, "bc": -0.05, "▁a": -0.5, "▁ab": -0.2}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    """The text begins with a blank of the tokenizer's own; the better score is merged first; unknown text is bytes."""
    fields = _sentencepiece()

    assert ["▁a", "bc"] == _cut(fields, "abc", tmp_path)
    assert ["▁ab", "▁", "<0xC3>", "<0xA9>"] == _cut(fields, "ab é", tmp_path)


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    """Another kind, lists that do not fit together, a token that is not there, a field that is missing."""
    whole = _byte_level("gpt-2")
    for change, part in (
        ({"tokenizer.ggml.model": "bert"}, r"\(bert, gpt-2\) cannot be read from GGUF"),
        ({"tokenizer.ggml.pre": "chatglm"}, r"\(gpt2, chatglm\) cannot be read from GGUF"),
        ({"tokenizer.ggml.token_type": [1]}, "258 tokens, 1 token types"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "its tokenizer is damaged"),
        ({"tokenizer.ggml.eos_token_id": 999}, "its eos token is 999 of 258"),
    ):
        with pytest.raises(PreparationError, match=part):
            write_tokenizer(whole | change, tmp_path)
    with pytest.raises(PreparationError, match="267 tokens, 3 scores"):
        write_tokenizer(_sentencepiece() | {"tokenizer.ggml.scores": [0.0] * 3}, tmp_path)
    del whole["tokenizer.chat_template"]
    with pytest.raises(KeyError):
        write_tokenizer(whole, tmp_path)
