"""Packed files: the tensors that the kernels want, and nothing lost on the way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from shared.model.format_weights import FormatWeights
from shared.model.groups import Groups
from shared.model.kernels.cpu.packing import unpack_f32, unpack_q4, unpack_q8
from shared.model.numerics import WeightFormat
from shared.model.pack import pack
from shared.model.prepare import prepare
from shared.model.prepared import PreparationError, PreparedModel
from shared.model.tensor_file import map_tensors
from tests.support.tiny_models import VOCAB_SIZE, TinyModel, write_gguf


@pytest.fixture(scope="module")
def prepared(home: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """Biases, an untied head, 4-bit weights, 8-bit embedding and head."""
    model = TinyModel(model_type="qwen2", is_tied=False).build()
    kinds: Any = GGMLQuantizationType
    path = tmp_path_factory.mktemp("pack") / "q.gguf"
    return PreparedModel.load(
        prepare(write_gguf(model, path, matrix_type=kinds.Q4_0, top_type=kinds.Q8_0), home, lambda _: None)
    )


def _packed(prepared: PreparedModel, weight_format: WeightFormat) -> dict[str, Any]:
    pack(prepared, weight_format, lambda _: None)
    return map_tensors(prepared.packed_path(weight_format))


def test_names_are_those_of_the_kernels(prepared: PreparedModel) -> None:
    """Four products a layer, norms and biases; the embedding beside an untied head."""
    of_layer = ["qkv", "o", "gate_up", "down", "input_norm", "post_norm", "qkv_bias"]
    expected = {f"layers.{layer}.{name}" for layer in (0, 1) for name in of_layer} | {"final_norm", "head", "embedding"}

    assert expected == set(_packed(prepared, WeightFormat.Q4))


def test_each_format_holds_the_weights(prepared: PreparedModel) -> None:
    """q, k and v one after the other: float32 as it is, the source's own 4-bit groups, nearest 8-bit ones."""
    source = FormatWeights.load(prepared, WeightFormat.F32)
    names = [f"model.layers.1.self_attn.{each}_proj.weight" for each in "qkv"]
    expected = source.matrix(*names)
    assert not isinstance(expected, Groups)
    rows = len(expected)

    assert np.array_equal(expected, unpack_f32(_packed(prepared, WeightFormat.F32)["layers.1.qkv"], rows))
    q, d, m = unpack_q4(_packed(prepared, WeightFormat.Q4)["layers.1.qkv"], rows)
    assert np.array_equal(expected, Groups(q=q, d=d, m=m).dequantised())
    q, d = unpack_q8(_packed(prepared, WeightFormat.Q8)["layers.1.qkv"], rows)
    assert 0 < np.abs(Groups(q=q, d=d, m=None).dequantised() - expected).max() < np.abs(expected).max() / 200


@pytest.mark.parametrize("weight_format", [WeightFormat.Q4, WeightFormat.Q8])
def test_an_8_bit_head_stays_what_it_was(prepared: PreparedModel, weight_format: WeightFormat) -> None:
    """Read from the source's groups or quantised again, it is the same numbers."""
    head = FormatWeights.load(prepared, WeightFormat.F32).top_matrix("lm_head.weight")
    assert not isinstance(head, Groups)
    q, d = unpack_q8(_packed(prepared, weight_format)["head"], VOCAB_SIZE)

    assert np.array_equal(head, Groups(q=q, d=d, m=None).dequantised())


def test_a_damaged_folder_is_one_sentence(prepared: PreparedModel, tmp_path: Path) -> None:
    """Weights or groups cut short; no packed file is left."""
    for file in prepared.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    copy = PreparedModel.load(tmp_path)
    for path, weight_format in ((copy.groups_path, WeightFormat.Q4), (copy.weights_path, WeightFormat.F32)):
        copy.packed_path(weight_format).unlink(missing_ok=True)
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(PreparationError, match=f"{path.name} is .*damaged"):
            pack(copy, weight_format, lambda _: None)
        assert not copy.packed_path(weight_format).exists()
