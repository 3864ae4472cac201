"""Tiny random models of every family, made by transformers, as Hugging Face folders and as GGUF files."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from shared.text.pieces import byte_level_alphabet

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
VOCAB_SIZE = 259
BOS_ID, EOS_ID = 257, 258
WINDOW = 256
_K_GROUP = 256  # weights that share the scales of a "K" type
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What the test wants of a family; sizes are small but what the kernels take: two layers, heads of 64."""

    model_type: str = "llama"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_size: int = 128
    window: int = WINDOW
    is_tied: bool = True
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 100_000.0, "rope_type": "default"})
    seed: int = 7

    def build(self) -> Any:
        """The model in transformers, float32; norms and biases random too, so that leaving one out shows."""
        cast("Any", torch).manual_seed(self.seed)
        config = cast("Any", AutoConfig).for_model(
            self.model_type,
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.window,
            rms_norm_eps=1e-5,
            rope_parameters=dict(self.rope),
            tie_word_embeddings=self.is_tied,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            initializer_range=0.15,
        )
        model: Any = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "norm" in name:
                    value.copy_(1 + 0.3 * torch.randn_like(value))
                elif name.endswith("bias"):
                    value.copy_(0.5 * torch.randn_like(value))
        return model


LLAMA3_ROPE = {
    "rope_theta": 500_000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR_ROPE = {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0}
"""By what is special about each: rope scaling, biases, norms of heads, tied heads, sizes of heads and of their groups."""
FAMILIES = {
    "llama tied": TinyModel(),
    "llama untied, llama3 rope": TinyModel(is_tied=False, rope=LLAMA3_ROPE, window=16_384),
    "llama linear rope, no groups": TinyModel(num_heads=3, num_kv_heads=3, hidden_size=192, rope=LINEAR_ROPE),
    "smollm2": TinyModel(num_heads=3, num_kv_heads=1, hidden_size=96),
    "qwen2": TinyModel(model_type="qwen2", num_heads=6, num_kv_heads=2, is_tied=False),
    "qwen2 tied, seven heads on one": TinyModel(model_type="qwen2", num_heads=7, num_kv_heads=1, hidden_size=64),
    "qwen3 tied": TinyModel(model_type="qwen3", num_heads=4, num_kv_heads=1),
    "qwen3 heads of 128": TinyModel(model_type="qwen3", num_heads=3, num_kv_heads=1, head_dim=128, is_tied=False),
}


def write_hf(model: Any, folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """As a Hugging Face folder; a small `max_shard_size` cuts the weights into shards with an index."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer: Any = Tokenizer(models.BPE(byte_level_alphabet() | {"hi": 256}, [("h", "i")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def write_gguf(
    model: Any,
    path: Path,
    *,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    top_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "smollm",
    num_parts: int = 1,
    architecture: str | None = None,
    merges: Sequence[str] = ("h i",),
) -> Path:
    """As a GGUF file: the layers' matrices in `matrix_type`, embedding and head in `top_type`.

    What it claims may be otherwise: `num_parts`, that it is the first of so many; `architecture`, another one.
    """
    config = model.config
    writer: Any = gguf.GGUFWriter(path, architecture or config.model_type)
    if num_parts > 1:
        writer.add_uint16("split.count", num_parts)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _write_rope(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    alphabet = sorted(byte_level_alphabet().items(), key=lambda entry: entry[1])
    writer.add_token_list([*(character for character, _ in alphabet), "hi", "<s>", "</s>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    weights: dict[str, npt.NDArray[np.float32]] = {name: value.numpy() for name, value in model.state_dict().items()}
    _add(writer, "token_embd.weight", weights["model.embed_tokens.weight"], top_type)
    _add(writer, "output_norm.weight", weights["model.norm.weight"], gguf.GGMLQuantizationType.F32)
    if not config.tie_word_embeddings:
        _add(writer, "output.weight", weights["lm_head.weight"], top_type)
    for layer in range(config.num_hidden_layers):
        for name, hf_name in _LAYER_NAMES.items():
            values = weights.get(f"model.layers.{layer}.{hf_name}")
            if values is None:
                continue
            if config.model_type == "llama" and name in ("attn_q.weight", "attn_k.weight"):
                heads = config.num_attention_heads if name == "attn_q.weight" else config.num_key_value_heads
                pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
                values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
            _add(writer, f"blk.{layer}.{name}", values, matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_rope(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    match rope["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
        case "llama3":  # as the format has it: the factors themselves, no parameters
            factors = [_llama3_factor(rope, place / config.head_dim) for place in range(0, config.head_dim, 2)]
            writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
        case _:
            pass


def _llama3_factor(rope: Mapping[str, float], exponent: float) -> float:
    """What one frequency is divided by (Llama 3.1): nothing for short waves, all of it for long, between them a mix."""
    waves = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** exponent)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    if waves > high:
        return 1.0
    if waves < low:
        return factor
    smooth = (waves - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _add(writer: Any, name: str, values: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> None:
    if values.ndim == 1 or kind is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    elif kind is not gguf.GGMLQuantizationType.Q4_K:
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    elif values.shape[1] % _K_GROUP == 0:
        writer.add_tensor(name, _any_q4_k(*values.shape), raw_dtype=kind)
    else:  # what does not fill the large groups of these types is kept in others, as llama.cpp does
        _add(writer, name, values, gguf.GGMLQuantizationType.Q5_0)


def _any_q4_k(rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Some weights in Q4_K, which `gguf` reads and does not write: two float16 scales, then 140 bytes, for each 256."""
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, columns // _K_GROUP, 144), dtype=np.uint8)
    blocks[..., :4] = np.array([2e-4, 1e-3], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
