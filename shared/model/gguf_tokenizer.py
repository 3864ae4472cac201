"""The tokenizer inside a GGUF file, written as the files of a Hugging Face tokenizer.

Read with the `gguf` package and not through transformers: that needs a further package for it, takes 20 times as long,
and leaves out the digit splitting of the default model's tokenizer.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shared.model.prepared import PreparationError

_CONTROL, _USER_DEFINED = 3, 4  # of the file's token types: no text of its own; text that is never cut
_BLANK = "\u2581"


def _bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_alone() -> Any:
    # Without it "\n\n1" would be cut into other tokens than the model was trained on.
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), _bytes_only()])


def _words(digits: str) -> Callable[[], Any]:
    """The split of the GPT-4 kin: contractions, words, runs of `digits`, punctuation, blanks."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def make() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


_PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": _bytes_only,
    "default": _bytes_only,
    "smollm": _digits_alone,
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
}
_WHOLE_WORDS_FIRST = ("llama-bpe",)  # a word that is a token is taken as it is, whatever its merges would give
_COMPOSED = ("qwen2",)  # text is brought into Unicode's composed form first


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`.

    `fields` are the file's metadata. Raises PreparationError for a tokenizer that is damaged or of another kind, and
    KeyError for a field that is missing.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    if len(types) != len(tokens):
        raise PreparationError(f"its tokenizer is damaged ({len(tokens)} tokens, {len(types)} token types)")
    family, variant = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    try:
        if family == "gpt2" and variant in _PRE_TOKENIZERS:
            tokenizer = _byte_level(fields, tokens, variant)
        elif family == "llama":
            tokenizer = _sentencepiece(fields, tokens)
        else:
            raise PreparationError(
                f"its tokenizer ({family}, {variant}) cannot be read from GGUF here; "
                "give the Hugging Face folder instead"
            )
    except (KeyError, PreparationError):
        raise
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower for merges without their tokens
        raise PreparationError(f"its tokenizer is damaged ({error})") from None
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    template = fields["tokenizer.chat_template"]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{field}_token_id")
        if token_id is not None:
            if not 0 <= token_id < len(tokens):
                raise PreparationError(f"its tokenizer is damaged (its {role} token is {token_id} of {len(tokens)})")
            settings[f"{role}_token"] = tokens[token_id]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _byte_level(fields: Mapping[str, Any], tokens: list[str], variant: str) -> Any:
    merges = [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=variant in _WHOLE_WORDS_FIRST))
    if variant in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[variant]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str]) -> Any:
    """The BPE kind of SentencePiece (Llama 1 and 2): merges follow from the tokens' scores, best first."""
    scores: list[float] = fields["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise PreparationError(f"its tokenizer is damaged ({len(tokens)} tokens, {len(scores)} scores)")
    vocabulary = {token: place for place, token in enumerate(tokens)}
    unknown = tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))]
    model = models.BPE(vocabulary, _merges_of(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer: Any = Tokenizer(model)
    has_first_blank = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    first: list[Any] = [normalizers.Prepend(_BLANK)] if has_first_blank else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _BLANK)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if has_first_blank else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two others; the token with the best score comes first, as in SentencePiece."""
    cuts = [
        (-scores[place], vocabulary[token[:cut]], vocabulary[token[cut:]], (token[:cut], token[cut:]))
        for token, place in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [pair for _, _, _, pair in sorted(cuts)]
