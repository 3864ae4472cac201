"""Preparation: what comes out, that it is done once, and one sentence for whatever cannot be prepared."""

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import torch as safetensors_torch
from transformers import LlamaForCausalLM

from shared.model.prepare import prepare
from shared.model.prepared import PreparationError, PreparedModel
from shared.text.chat import ChatMessage, ChatTokenizer

_CONTENTS = ["chat_template.jinja", "config.json", "firsttoken.json", "model.safetensors", "tokenizer.json"]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return cast("dict[str, torch.Tensor]", cast("Any", safetensors_torch).load_file(folder / "model.safetensors"))


def _copy(source: Path, target: Path, **config: object) -> Path:
    shutil.copytree(source, target)
    fields = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(fields))
    return target


def test_gguf_and_folder_of_one_model_agree(
    tiny_model: LlamaForCausalLM, tiny_gguf: Path, tiny_dir: Path, home: Path
) -> None:
    """Both sources give the same weights, facts and prompt tokens as the model they were made from."""
    lines: list[str] = []
    from_gguf = prepare(tiny_gguf, home, lines.append)
    expected = {name: value for name, value in tiny_model.state_dict().items() if name != "lm_head.weight"}
    for folder in (from_gguf, tiny_dir):
        weights = _weights(folder)
        assert sorted(weights) == sorted(expected)
        assert [name for name in weights if not torch.equal(weights[name], expected[name])] == []
        prepared = PreparedModel.load(folder)
        assert (prepared.name, prepared.window, prepared.eos_ids) == ("tiny", 128, {258})
        assert set(_CONTENTS) <= {file.name for file in folder.iterdir()}
        assert ChatTokenizer.load(folder).render([ChatMessage(role="user", content="hé 12")]) == (
            257,
            *"hé 12".encode(),
        )
    assert len(lines) >= 3
    assert from_gguf != tiny_dir


def test_the_second_call_returns_at_once(tiny_hf_dir: Path, tiny_dir: Path, home: Path) -> None:
    """It reads no source, reports nothing, and takes less than a tenth of a second."""
    lines: list[str] = []
    started = time.monotonic()
    assert prepare(tiny_hf_dir, home, lines.append) == tiny_dir
    assert time.monotonic() - started < 0.1
    assert lines == []


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


def test_a_gguf_that_makes_no_sense(odd_gguf: Path, tmp_path: Path) -> None:
    """Whole, but its tokenizer cannot be built."""
    with pytest.raises(PreparationError, match="its tokenizer is damaged"):
        prepare(odd_gguf, tmp_path, lambda _: None)


def test_folders_that_cannot_be_served(tiny_hf_dir: Path, tmp_path: Path) -> None:
    """Another architecture, a missing config, template, tokenizer or weight: each its own sentence."""

    def refusal(folder: Path) -> str:
        with pytest.raises(PreparationError) as caught:
            prepare(folder, tmp_path, lambda _: None)
        return str(caught.value)

    assert "model type 'mamba' is not supported" in refusal(_copy(tiny_hf_dir, tmp_path / "a", model_type="mamba"))
    assert "attention_bias" in refusal(_copy(tiny_hf_dir, tmp_path / "b", attention_bias=True))
    for removed, part in (
        ("config.json", "no readable config.json"),
        ("chat_template.jinja", "no chat template"),
        ("tokenizer.json", "tokenizer is missing or damaged"),
        ("model.safetensors", "weights are missing or damaged"),
    ):
        folder = shutil.copytree(tiny_hf_dir, tmp_path / f"without-{removed}")
        (folder / removed).unlink()
        assert part in refusal(folder), removed
    damaged = shutil.copytree(tiny_hf_dir, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\0" * 100)
    assert "weights are missing or damaged" in refusal(damaged)


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
    (tmp_path / "firsttoken.json").write_text('{"prepare_version": 1}')
    with pytest.raises(PreparationError, match="damaged"):
        PreparedModel.load(tmp_path)
