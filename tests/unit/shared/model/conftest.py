"""A tiny Llama model with random weights, as a Hugging Face folder and as a GGUF file that say the same."""

import json
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from shared.model.prepare import prepare
from shared.text.pieces import byte_level_alphabet

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
_LAYER_NAMES = {
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


@pytest.fixture(scope="session")
def tiny_model() -> LlamaForCausalLM:
    """Two layers, four heads on two kv heads, 259 tokens, window 128, tied head."""
    cast("Any", torch).manual_seed(7)
    config = cast("Any", LlamaConfig)(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=257,
        eos_token_id=258,
        initializer_range=0.3,
    )
    return cast("Any", LlamaForCausalLM)(config).eval()


@pytest.fixture(scope="session")
def tiny_hf_dir(tiny_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    cast("Any", tiny_model).save_pretrained(folder)
    tokenizer: Any = Tokenizer(models.BPE(byte_level_alphabet() | {"hi": 256}, [("h", "i")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tiny_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf"
    _write_gguf(path, tiny_model, merges=["h i"])
    return path


@pytest.fixture(scope="session")
def odd_gguf(tiny_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that is whole but whose tokenizer makes no sense: a merge into a token that it does not have."""
    path = tmp_path_factory.mktemp("odd") / "odd.gguf"
    _write_gguf(path, tiny_model, merges=["x y"])
    return path


def _write_gguf(path: Path, model: LlamaForCausalLM, merges: list[str]) -> None:
    """Float32 weights, the rotary pairs of q and k interleaved as the format has them."""
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(12)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = sorted(byte_level_alphabet().items(), key=lambda entry: entry[1])
    writer.add_token_list([*(character for character, _ in alphabet), "hi", "<s>", "</s>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(CHAT_TEMPLATE)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(2):
        for name, hf_name in _LAYER_NAMES.items():
            values = weights[f"model.layers.{layer}.{hf_name}.weight"]
            if name in ("attn_q", "attn_k"):
                heads = 4 if name == "attn_q" else 2
                pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
                values = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))
            writer.add_tensor(f"blk.{layer}.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder that the tests of this package share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def tiny_dir(tiny_hf_dir: Path, home: Path) -> Path:
    """The prepared folder of the tiny model."""
    return prepare(tiny_hf_dir, home, lambda _: None)
