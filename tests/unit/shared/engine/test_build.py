"""Tests of `shared.engine.build`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from shared.domain.ids import TokenId
from shared.engine.build import Engine, build_engine
from shared.engine.scripted import ScriptedExecutor
from shared.engine.torch_executor import TorchExecutor
from shared.model.prepared import PreparationError, PreparedModel


class _Clock:
    def monotonic(self) -> float:
        return 0.0

    def unix_ms(self) -> int:
        return 0


def _build(
    *, model_dir: Path | None = None, block_size: int = 16, kv_pool_mib: int = 1, chunk_tokens: int = 64
) -> Engine:
    return build_engine(
        model_dir=model_dir,
        block_size=block_size,
        kv_pool_mib=kv_pool_mib,
        chunk_tokens=chunk_tokens,
        num_threads=1,
        clock=_Clock(),
    )


def test_the_pool_holds_what_fits() -> None:
    """1 MiB at 64 bytes a token and 16 tokens a block: 1,024 blocks, shared by executor and memory."""
    engine = _build()

    assert isinstance(engine.executor, ScriptedExecutor)
    assert (1024, engine.memory.layout) == (engine.memory.num_blocks, engine.executor.layout)


@pytest.mark.parametrize("chunk_tokens", [0, 8, 24])
def test_chunks_must_end_at_blocks(chunk_tokens: int) -> None:
    """A frame starts at a block, so a chunk must end at one."""
    with pytest.raises(ValueError, match="multiple of the block size"):
        _build(chunk_tokens=chunk_tokens)


def test_a_pool_without_a_block_is_refused() -> None:
    """Better at the start than at the first request."""
    with pytest.raises(ValueError, match="holds no block"):
        _build(kv_pool_mib=0)


def test_a_scripted_engine_loads_no_torch() -> None:
    """In a fresh interpreter: scripted workers start in a fraction of a second."""
    code = "import sys; import shared.engine.build, shared.engine.step_loop; sys.exit('torch' in sys.modules)"

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode


def _prepared(folder: Path) -> Path:
    """A prepared folder of one layer, all weights zero."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    prepared = PreparedModel(folder=folder, name="tiny", window=100, eos_ids=frozenset({TokenId(3)}), source_hash="00")
    prepared.write_facts()
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (8, 8),
        "self_attn.k_proj": (4, 8),
        "self_attn.v_proj": (4, 8),
    }
    shapes |= dict.fromkeys(("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), (8, 8))
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (8,))
    weights = {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    weights |= {"model.embed_tokens.weight": torch.zeros(16, 8), "model.norm.weight": torch.zeros(8)}
    cast("Any", safetensors.torch).save_file(weights, prepared.weights_path)
    return folder


def test_a_prepared_folder_gives_the_model(tmp_path: Path) -> None:
    """Window and end tokens are those of preparation; the pool is cut to the model's layout."""
    engine = _build(model_dir=_prepared(tmp_path))
    executor = engine.executor

    assert isinstance(executor, TorchExecutor)
    assert (100, {3}) == (executor.window, executor.eos_ids)
    assert (1 << 20) // (2 * 4 * 4 * 16) == engine.memory.num_blocks


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """With the one sentence of preparation, for the person who set the folder."""
    with pytest.raises(PreparationError):
        _build(model_dir=tmp_path)
