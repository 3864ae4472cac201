"""A GGUF file, unpacked into the files of a prepared folder."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from safetensors import numpy as safetensors_numpy

from shared.domain.ids import TokenId
from shared.model.config import ModelConfig, rope_of
from shared.model.gguf_tensors import ROPE_FACTORS, read_tensor
from shared.model.gguf_tokenizer import write_tokenizer
from shared.model.groups import Groups
from shared.model.prepared import GROUPS_FILE, WEIGHTS_FILE, PreparationError, SourceFacts
from shared.model.rope import rotary_frequencies
from shared.model.weights import PRODUCTS, check_weights

MAGIC = b"GGUF"

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Llama 3.1 and 3.2 name no parameters in the file, only the factors that follow from these.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_END_TOKENS = ("eos", "eot", "eom")  # of a text, a turn, a message: each ends an answer


def unpack_gguf(path: Path, folder: Path, report: Callable[[str], None]) -> SourceFacts:
    """Write config, tokenizer, chat template and weights into `folder`.

    Raises PreparationError, one sentence, when the file is damaged or holds what is not supported.
    """
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, struct.error, OSError, UnicodeDecodeError, OverflowError, MemoryError):
        raise PreparationError(f"{path} is damaged or cut short: its GGUF header cannot be read") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        if fields.get("split.count", 1) > 1:
            raise PreparationError("a model in several GGUF files is not supported; join its parts into one first")
        factors = tensors.pop(ROPE_FACTORS, None)
        config_fields = _config(
            fields, has_own_head="output.weight" in tensors, rope_factors=None if factors is None else factors.data
        )
        config = ModelConfig.from_hf(config_fields)
        end_fields = [f"tokenizer.ggml.{name}_token_id" for name in _END_TOKENS]
        end_ids = frozenset(TokenId(int(fields[name])) for name in end_fields if name in fields)
        if not end_ids:
            raise PreparationError("no token that ends an answer is named (tokenizer.ggml.eos_token_id)")
        report("writing the tokenizer")
        write_tokenizer(fields, folder)
        (folder / "config.json").write_text(json.dumps(config_fields, indent=2) + "\n", encoding="utf-8")
        report(f"unpacking {len(tensors)} weights to float32")
        has_groups = _write_weights(list(tensors.values()), config, fields["general.architecture"], folder)
    except KeyError as error:
        raise PreparationError(f"{path} has no {error.args[0]}") from None
    except PreparationError as error:
        raise PreparationError(f"{path}: {error}") from None
    return SourceFacts(window=config.window, eos_ids=end_ids, has_4bit_groups=has_groups)


def _write_weights(tensors: list[Any], config: ModelConfig, architecture: str, folder: Path) -> bool:
    """Float32 weights, and where all products' matrices are 4-bit, their groups too; returns whether they are."""
    weights: dict[str, npt.NDArray[np.float32]] = {}
    groups: dict[str, Groups] = {}
    for tensor in tensors:
        name, values, of_tensor = read_tensor(tensor, config, architecture)
        weights[name] = values
        if of_tensor is not None:
            groups[name] = of_tensor
    check_weights(config, {name: values.shape for name, values in weights.items()})
    for name, values in weights.items():
        if not np.isfinite(values).all():
            raise PreparationError(f"weight {name} is damaged: it holds what is no number")
    save: Any = cast("Any", safetensors_numpy).save_file
    save(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    suffixes = tuple(f"{name}.weight" for parts in PRODUCTS.values() for name in parts)
    products = [name for name in weights if name.endswith(suffixes)]
    if not all(name in groups and groups[name].is_4bit for name in products):
        return False
    tops = [name for name in weights if not name.startswith("model.layers.")]
    kept = products + [name for name in tops if name in groups and not groups[name].is_4bit]
    save({key: value for name in kept for key, value in groups[name].to_tensors(name).items()}, folder / GROUPS_FILE)
    return True


def _config(
    fields: Mapping[str, Any], *, has_own_head: bool, rope_factors: npt.NDArray[np.float32] | None
) -> dict[str, Any]:
    """The Hugging Face config that says what the file says."""
    architecture = fields["general.architecture"]
    if architecture not in _ARCHITECTURES:
        raise PreparationError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )

    def field(name: str, *default: Any) -> Any:
        return fields.get(f"{architecture}.{name}", *default) if default else fields[f"{architecture}.{name}"]

    num_heads = int(field("attention.head_count"))
    hidden_size = int(field("embedding_length"))
    head_dim = int(field("attention.key_length", hidden_size // num_heads))
    return {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(field("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(field("context_length")),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        **_rope(field, head_dim, rope_factors),
        "tie_word_embeddings": not has_own_head,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _rope(field: Callable[..., Any], head_dim: int, rope_factors: npt.NDArray[np.float32] | None) -> dict[str, Any]:
    theta = float(field("rope.freq_base", 10_000.0))
    turned = int(field("rope.dimension_count", head_dim))
    if turned != head_dim:
        raise PreparationError(f"rotary positions on {turned} of {head_dim} numbers of a head are not supported")
    kind = field("rope.scaling.type", "none")
    if rope_factors is not None:
        scaling = {"rope_type": "llama3", "factor": float(np.max(rope_factors)), **_LLAMA3_ROPE}
        if not _gives(scaling, theta, head_dim, np.asarray(rope_factors).reshape(-1)):
            raise PreparationError(f"the rotary factors in {ROPE_FACTORS} are not those of Llama 3")
    elif kind == "none":
        return {"rope_theta": theta}
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": float(field("rope.scaling.factor"))}
    else:
        raise PreparationError(f"rotary positions of type {kind!r} are not supported")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _gives(scaling: Mapping[str, Any], theta: float, head_dim: int, factors: npt.NDArray[np.float32]) -> bool:
    """Whether these parameters divide each frequency by the factor that the file has."""
    plain = {"rope_theta": theta}
    stretched = rope_of({**plain, "rope_scaling": dict(scaling)})
    ours = rotary_frequencies(rope_of(plain), head_dim) / rotary_frequencies(stretched, head_dim)
    return ours.shape == factors.shape and bool(np.allclose(ours, factors, rtol=1e-4))
