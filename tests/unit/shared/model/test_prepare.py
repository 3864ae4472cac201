"""Preparation: what comes out, that it is done once, and one sentence for whatever cannot be prepared."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors import torch as safetensors_torch

from shared.model.numerics import NumericMode
from shared.model.prepare import prepare, prepare_mode
from shared.model.prepared import PREPARE_VERSION, PreparationError, PreparedModel
from shared.text.chat import ChatMessage, ChatTokenizer
from tests.support.tiny_models import TinyModel, write_gguf, write_hf

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles the kernels

YARN_ROPE = {"rope_theta": 10_000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_CONTENTS = ["chat_template.jinja", "config.json", "firsttoken.json", "model.safetensors", "tokenizer.json"]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return cast("dict[str, torch.Tensor]", cast("Any", safetensors_torch).load_file(folder / "model.safetensors"))


def _copy(source: Path, target: Path, **config: object) -> Path:
    shutil.copytree(source, target)
    fields = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(fields))
    return target


def test_gguf_and_folder_of_one_model_agree(tiny_model: Any, tiny_gguf: Path, tiny_dir: Path, home: Path) -> None:
    """Both sources give the same weights, facts and prompt tokens as the model they were made from."""
    lines: list[str] = []
    from_gguf = prepare(tiny_gguf, home, lines.append)
    expected = {name: value for name, value in tiny_model.state_dict().items() if name != "lm_head.weight"}
    for folder in (from_gguf, tiny_dir):
        weights = _weights(folder)
        assert sorted(weights) == sorted(expected)
        assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
        prepared = PreparedModel.load(folder)
        assert (prepared.name, prepared.window, prepared.eos_ids) == ("tiny", 256, {258})
        assert prepared.default_mode == NumericMode.F32
        assert set(_CONTENTS) <= {file.name for file in folder.iterdir()}
        assert ChatTokenizer.load(folder).render([ChatMessage(role="user", content="hé 12")]) == (
            257,
            *"hé 12".encode(),
        )
    assert len(lines) >= 3
    assert from_gguf != tiny_dir


def test_the_second_call_returns_at_once(tiny_hf_dir: Path, tiny_dir: Path, home: Path) -> None:
    """It reports nothing, and writes nothing."""
    written = {file: file.stat().st_mtime_ns for file in tiny_dir.rglob("*")}
    lines: list[str] = []
    assert prepare(tiny_hf_dir, home, lines.append) == tiny_dir
    assert lines == []
    assert written == {file: file.stat().st_mtime_ns for file in tiny_dir.rglob("*")}


def test_a_changed_source_is_prepared_anew(tiny_hf_dir: Path, tiny_dir: Path, home: Path, tmp_path: Path) -> None:
    """Other content, other folder; the same content elsewhere, the same folder."""
    assert prepare(_copy(tiny_hf_dir, tmp_path / "tiny", rms_norm_eps=1e-3), home, lambda _: None) != tiny_dir
    again = shutil.copytree(tiny_hf_dir, tmp_path / "again" / "tiny")
    assert prepare(again, home, lambda _: None) == tiny_dir


def test_two_at_once_prepare_once(tiny_gguf: Path, tmp_path: Path) -> None:
    """The second waits for the first and finds its folder; nothing unfinished is left."""
    lines: list[str] = []
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare(tiny_gguf, tmp_path, lines.append))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 2
    assert results[0] == results[1]
    assert sum("unpacking" in line for line in lines) == 1
    assert list((tmp_path / "models").glob(".unfinished-*")) == []


def test_what_a_killed_preparation_left_is_removed(tiny_gguf: Path, tmp_path: Path) -> None:
    """An unfinished folder is not used and goes with the next preparation."""
    leftover = tmp_path / "models" / ".unfinished-old"
    leftover.mkdir(parents=True)
    prepare(tiny_gguf, tmp_path, lambda _: None)
    assert not leftover.exists()


@pytest.mark.parametrize("kept_bytes", [0, 3, 40, 3000, 100_000])
def test_a_gguf_that_is_cut_short(tiny_gguf: Path, tmp_path: Path, kept_bytes: int) -> None:
    """Wherever the file ends, it is one sentence that names the file, and nothing is left."""
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(tiny_gguf.read_bytes()[:kept_bytes])
    with pytest.raises(PreparationError, match=r"cut\.gguf"):
        prepare(damaged, tmp_path, lambda _: None)
    assert [each for each in (tmp_path / "models").iterdir() if each.name not in (".lock", "index")] == []


def test_a_gguf_that_makes_no_sense(tiny_model: Any, tmp_path: Path) -> None:
    """Whole, but its tokenizer cannot be built: a merge into a token that it does not have."""
    odd = write_gguf(tiny_model, tmp_path / "odd.gguf", merges=["x y"])
    with pytest.raises(PreparationError, match="its tokenizer is damaged"):
        prepare(odd, tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        (TinyModel(), {"num_parts": 3}, "in several GGUF files is not supported"),
        (TinyModel(rope=YARN_ROPE), {}, "rotary positions of type 'yarn' are not supported"),
        (
            TinyModel(),
            {"architecture": "mamba"},
            "architecture 'mamba' is not supported; supported: llama, qwen2, qwen3",
        ),
        (
            TinyModel(model_type="qwen3"),
            {"architecture": "qwen2"},
            "weight model.layers.0.self_attn.q_proj.bias is missing",
        ),
        (TinyModel(), {"pre": "chatglm"}, "(gpt2, chatglm) cannot be read from GGUF here"),
    ],
)
def test_ggufs_that_cannot_be_served(family: TinyModel, changes: dict[str, Any], part: str, tmp_path: Path) -> None:
    """Parts of a model, another architecture or variant of one, another tokenizer: each its own sentence."""
    source = write_gguf(family.build(), tmp_path / "whole.gguf", **changes)

    assert part in _refusal(source, tmp_path)


def _refusal(source: Path, home: Path) -> str:
    with pytest.raises(PreparationError) as caught:
        prepare(source, home, lambda _: None)
    assert source.name in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_that_cannot_be_served(tiny_hf_dir: Path, tmp_path: Path) -> None:
    """Another architecture, a missing config, template, tokenizer or weight: each its own sentence."""
    for name, change, part in (
        ("a", {"model_type": "mamba"}, "model type 'mamba' is not supported"),
        ("b", {"attention_bias": True}, "attention_bias"),
        ("c", {"quantization_config": {"quant_method": "awq"}}, "quantised already"),
        ("d", {"num_hidden_layers": 3}, "weight model.layers.2.input_layernorm.weight is missing"),
        ("e", {"num_hidden_layers": 1}, "weight model.layers.1.input_layernorm.weight is none"),
        ("f", {"vocab_size": 300}, "has the shape [259, 128], the config says [300, 128]"),
        ("g", {"eos_token_id": "end"}, "no token id ('end')"),
    ):
        folder = _copy(tiny_hf_dir, tmp_path / name, **change)
        (folder / "generation_config.json").unlink(missing_ok=True)
        assert part in _refusal(folder, tmp_path), name
    for removed, part in (
        ("config.json", "no readable config.json"),
        ("chat_template.jinja", "no chat template"),
        ("tokenizer.json", "tokenizer is missing or damaged"),
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
    ):
        folder = shutil.copytree(tiny_hf_dir, tmp_path / f"without-{removed}")
        (folder / removed).unlink()
        assert part in _refusal(folder, tmp_path), removed
    damaged = shutil.copytree(tiny_hf_dir, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\0" * 100)
    assert "model.safetensors is missing or damaged" in _refusal(damaged, tmp_path)


def test_shards_that_cannot_be_served(tiny_model: Any, tmp_path: Path) -> None:
    """A shard that is not there, cut short or of another place; an index that says nothing."""
    whole = write_hf(tiny_model, tmp_path / "whole", max_shard_size="300KB")
    shards = sorted(whole.glob("model-*.safetensors"))
    assert len(shards) > 2
    index = "model.safetensors.index.json"

    def changed(name: str, file: str, content: bytes | None) -> Path:
        folder = shutil.copytree(whole, tmp_path / name)
        (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
        return folder

    missing = shards[1].name
    assert f"{missing} is missing, which {index} names" in _refusal(changed("a", missing, None), tmp_path)
    cut = changed("b", missing, shards[1].read_bytes()[:-10])
    assert f"{missing} is missing or damaged" in _refusal(cut, tmp_path)
    assert f"{index} is damaged: it has no weight_map" in _refusal(changed("c", index, b"{}"), tmp_path)
    outside = json.dumps({"weight_map": {"lm_head.weight": "../secret"}}).encode()
    assert "it names ../secret" in _refusal(changed("d", index, outside), tmp_path)
    assert "it is not JSON" in _refusal(changed("e", index, b"{"), tmp_path)


def test_weights_that_are_no_numbers(tiny_hf_dir: Path, tmp_path: Path) -> None:
    """They would give every answer the same fault; better said once, with the weight's name."""
    folder = shutil.copytree(tiny_hf_dir, tmp_path / "nan")
    weights = _weights(folder)
    weights["model.norm.weight"][3] = torch.nan
    cast("Any", safetensors_torch).save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    assert "weight model.norm.weight is damaged: it holds what is no number" in _refusal(folder, tmp_path)


def test_a_mode_is_packed_once_and_only_where_it_can_be(tiny_q4: PreparedModel, tiny_dir: Path, home: Path) -> None:
    """The folder says which mode suits it; another costs a file, and one that is impossible a sentence."""
    lines: list[str] = []
    assert tiny_q4.default_mode == NumericMode.Q4A16
    for mode in (NumericMode.Q4A16, NumericMode.Q4A8, NumericMode.Q8A16, NumericMode.Q8A16):
        prepare_mode(tiny_q4, mode, home, lines.append)
    assert [line for line in lines if "packing" in line] == [
        "tiny: packing weights (q4)",
        "tiny: packing weights (q8)",
    ]
    for mode, part in ((NumericMode.Q4A8, "tiny has no 4-bit weights"), (NumericMode.BF16, "torch backend only")):
        with pytest.raises(PreparationError, match=part):
            prepare_mode(PreparedModel.load(tiny_dir), mode, home, lines.append)


def test_other_quantisations_are_served_in_float32_or_8_bits(tmp_path: Path) -> None:
    """A file in Q4_K: its numbers are those that its own library reads; its groups are none that a q4 mode computes with."""
    model = TinyModel(hidden_size=256).build()
    path = write_gguf(model, tmp_path / "tiny-Q4_K_M.gguf", matrix_type=GGMLQuantizationType.Q4_K)
    prepared = PreparedModel.load(prepare(path, tmp_path, lambda _: None))
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    read = [tensors[f"blk.1.{name}.weight"] for name in ("ffn_up", "ffn_down")]
    expected = [np.asarray(dequantize(each.data, each.tensor_type)) for each in read]

    assert [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_0] == [each.tensor_type for each in read]
    weights = _weights(prepared.folder)
    names = ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight")
    assert [each.tobytes() for each in expected] == [weights[name].numpy().tobytes() for name in names]
    assert prepared.default_mode is NumericMode.F32
    for mode in (NumericMode.F32, NumericMode.Q8A16):
        prepare_mode(prepared, mode, tmp_path, lambda _: None)
    with pytest.raises(PreparationError, match="tiny has no 4-bit weights of type Q4_0 or Q4_1, so no q4 mode"):
        prepare_mode(prepared, NumericMode.Q4A16, tmp_path, lambda _: None)


def test_sizes_that_the_kernels_do_not_take(tmp_path: Path) -> None:
    """The folder is prepared, for torch; packing says what is wrong with it."""
    odd = TinyModel(head_dim=24).build()
    prepared = PreparedModel.load(prepare(write_hf(odd, tmp_path / "odd"), tmp_path, lambda _: None))
    with pytest.raises(PreparationError, match="a head size of 24 is no multiple of 32"):
        prepare_mode(prepared, NumericMode.F32, tmp_path, lambda _: None)


def test_a_source_that_is_nothing(tmp_path: Path) -> None:
    """Neither file, folder nor hub id."""
    with pytest.raises(PreparationError, match="neither a file nor a folder nor a hub id"):
        prepare("/no/such/model", tmp_path, lambda _: None)
    (tmp_path / "file").touch()
    with pytest.raises(PreparationError, match="cannot be used"):
        prepare("/no/such/model", tmp_path / "file", lambda _: None)


def test_a_folder_that_is_not_prepared(tmp_path: Path) -> None:
    """Services say what is wrong with the folder that they were given."""
    with pytest.raises(PreparationError, match="not a prepared model folder"):
        PreparedModel.load(tmp_path)
    (tmp_path / "firsttoken.json").write_text('{"prepare_version": 0}')
    with pytest.raises(PreparationError, match="another version"):
        PreparedModel.load(tmp_path)
    (tmp_path / "firsttoken.json").write_text(json.dumps({"prepare_version": PREPARE_VERSION}))
    with pytest.raises(PreparationError, match="damaged"):
        PreparedModel.load(tmp_path)
