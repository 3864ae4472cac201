"""A GGUF file, unpacked into the files of a prepared folder.

Read with the `gguf` package and not through transformers: that needs a further package for it, takes 20 times as long,
and leaves out the digit splitting of this tokenizer family.
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors import numpy as safetensors_numpy
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from shared.domain.ids import TokenId
from shared.model.config import ModelConfig
from shared.model.prepared import WEIGHTS_FILE, PreparationError

MAGIC = b"GGUF"

_PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "default": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    # Each digit alone; without it "\n\n1" would be cut as other tokens than the model was trained on.
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
_CONTROL, _USER_DEFINED = 3, 4  # of the file's token types: no text of its own; text that is never cut

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def unpack_gguf(path: Path, folder: Path, report: Callable[[str], None]) -> tuple[int, frozenset[TokenId]]:
    """Write config, tokenizer, chat template and float32 weights into `folder`; returns window and end-of-answer ids.

    Raises PreparationError, one sentence, when the file is damaged or holds what is not supported.
    """
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, struct.error, OSError, UnicodeDecodeError, OverflowError, MemoryError):
        raise PreparationError(f"{path} is damaged or cut short: its GGUF header cannot be read") from None
    names = [tensor.name for tensor in reader.tensors]
    try:
        config_fields = _config(fields, has_own_head="output.weight" in names)
        config = ModelConfig.from_hf(config_fields)
        eos_id = TokenId(int(fields["tokenizer.ggml.eos_token_id"]))
        report("writing the tokenizer")
        _write_tokenizer(fields, folder)
    except KeyError as error:
        raise PreparationError(f"{path} has no {error.args[0]}") from None
    except PreparationError as error:
        raise PreparationError(f"{path}: {error}") from None
    (folder / "config.json").write_text(json.dumps(config_fields, indent=2) + "\n", encoding="utf-8")
    report(f"unpacking {len(names)} weights to float32")
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        try:
            name, values = _hf_name(tensor.name), dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError, KeyError):
            raise PreparationError(f"{path}: weight {tensor.name} is not supported or damaged") from None
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _rotary_halves(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        weights[name] = np.ascontiguousarray(values, dtype=np.float32)
    report("writing the weights")
    cast("Any", safetensors_numpy).save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return config.window, frozenset({eos_id})


def _config(fields: Mapping[str, Any], *, has_own_head: bool) -> dict[str, Any]:
    """The Hugging Face config that says what the file says."""
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise PreparationError(f"architecture {architecture!r} is not supported; supported: llama")
    num_heads = int(fields["llama.attention.head_count"])
    hidden_size = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": int(fields.get("llama.attention.key_length", hidden_size // num_heads)),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": not has_own_head,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    family, variant = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    if family != "gpt2" or variant not in _PRE_TOKENIZERS:
        raise PreparationError(
            f"its tokenizer ({family}, {variant}) cannot be read from GGUF here; give the Hugging Face folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in fields["tokenizer.ggml.merges"]]
    try:
        tokenizer: Any = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower for merges without their tokens
        raise PreparationError(f"its tokenizer is damaged ({error})") from None
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[variant]()
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = fields["tokenizer.ggml.token_type"]
    if len(types) != len(tokens):
        raise PreparationError(f"its tokenizer is damaged ({len(tokens)} tokens, {len(types)} token types)")
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{field}_token_id")
        if token_id is not None:
            settings[f"{role}_token"] = tokens[token_id]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _hf_name(name: str) -> str:
    """The Hugging Face name of a weight; KeyError for one that this architecture does not have."""
    if name in _TOP_TENSORS:
        return _TOP_TENSORS[name]
    match name.split("."):
        case ["blk", number, kind, "weight"]:
            return f"model.layers.{int(number)}.{_LAYER_TENSORS[kind]}.weight"
        case _:
            raise KeyError(name)


def _rotary_halves(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """The file interleaves the two halves of each head's rotary pairs; put them back one after the other."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
