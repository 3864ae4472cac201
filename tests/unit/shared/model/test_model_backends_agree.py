"""The `cpu` backend against the `torch` backend, its reference: operation by operation, and stage by stage.

Tolerances. Both round activations to the same integers; sums differ by float32's rounding, some 1e-6 of their terms.
Behind the first product that difference moves a few activations across the border between two integers, so that from
there on int16 modes agree as far as int16 itself is exact (3e-5 of a group's largest number each), and int8 ones only
as far as int8 (8e-3).
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shared.kv.memory import KvMemory
from shared.model.kernels.cpu.model import CpuModel
from shared.model.model import Model, Segment
from shared.model.numerics import GROUP, NumericMode
from shared.model.prepare import prepare, prepare_mode
from shared.model.prepared import PreparedModel
from shared.model.torch_layers import as_tensor, make_linear, rounded
from shared.model.torch_model import TorchModel
from tests.support.greedy import greedy_answers
from tests.support.kernel_products import MODES, make_rows, make_weights, multiply, prepare_rows
from tests.support.tiny_models import VOCAB_SIZE, TinyModel, write_gguf

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles the kernels

CPU_MODES = [mode for mode in NumericMode if mode is not NumericMode.BF16]
# Largest difference behind the first product, as a share of the numbers' own spread.
LATER_TOLERANCES = {None: 1e-4, 16: 5e-3, 8: 0.5}
NUM_TOKENS = 40


@pytest.mark.parametrize(("mode", "bits"), [("q4a16", 16), ("q4a8", 8)])
def test_activations_are_rounded_alike(mode: str, bits: int) -> None:
    """To the last bit: the same integers, the same scales."""
    rows = make_rows(9, 192)
    rows[3, 32:64] = 0
    of_kernels = prepare_rows(MODES[mode], rows)
    values = of_kernels.q.astype(np.float32) * np.repeat(of_kernels.scale, GROUP, axis=1)

    assert np.array_equal(rounded(as_tensor(rows), bits).numpy(), values)


@pytest.mark.parametrize(("mode", "bits"), [("f32", None), ("q4f32", None), ("q4a16", 16), ("q4a8", 8), ("q8a16", 16)])
def test_products_agree(mode: str, bits: int | None) -> None:
    """Within 1e-5 of the sum of the terms' magnitudes."""
    weights = make_weights(MODES[mode], 48, 192)
    rows = make_rows(21, 192)
    ours = multiply(MODES[mode], weights, prepare_rows(MODES[mode], rows))[:, :48]
    expected = make_linear(as_tensor(weights.values), bits)(as_tensor(rows)).numpy()

    assert (np.abs(ours - expected) <= 1e-5 * (np.abs(rows) @ np.abs(weights.values).T)).all()


@pytest.fixture(
    scope="module",
    params=[TinyModel(model_type="qwen2", num_heads=6), TinyModel(model_type="qwen3", head_dim=128, is_tied=False)],
    ids=["qwen2", "qwen3"],
)
def prepared(request: pytest.FixtureRequest, home: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """Biases and norms of heads, tied and untied, heads of 64 and 128; 4-bit weights, so that all modes are possible."""
    path = tmp_path_factory.mktemp("agree") / "tiny.gguf"
    model: TinyModel = request.param
    found = prepare(write_gguf(model.build(), path, matrix_type=_types().Q4_1, top_type=_types().Q8_0), home, _quiet)
    prepared = PreparedModel.load(found)
    for mode in CPU_MODES:
        prepare_mode(prepared, mode, home, _quiet)
    return prepared


def _types() -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType


def _quiet(_: str) -> None: ...


def _computed(model: Model, kv_dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.float32]]:
    """Keys [layer, position, number], values alike, and logits, of a prompt in two chunks."""
    memory = KvMemory(model.layout(16, kv_dtype), 3)
    table = np.array([2, 0, 1])
    ids: list[int] = np.random.default_rng(3).integers(0, VOCAB_SIZE, NUM_TOKENS).tolist()
    model.forward(memory, [Segment(token_ids=ids[:19], start=0, block_table=table, want_logits=False)])
    logits = model.forward(memory, [Segment(token_ids=ids[19:], start=19, block_table=table, want_logits=True)])[0]
    keys = memory.keys()[table].transpose(1, 0, 4, 2, 3).reshape(2, 48, -1)[:, :NUM_TOKENS]
    values = memory.values()[table].transpose(1, 0, 3, 2, 4).reshape(2, 48, -1)[:, :NUM_TOKENS]
    return keys, values, logits.copy()


def _difference(ours: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The largest, as a share of the spread of what is expected."""
    return float(np.abs(ours.astype(np.float64) - expected).max() / np.std(expected.astype(np.float64)))


@pytest.mark.parametrize("mode", CPU_MODES)
def test_stages_agree(prepared: PreparedModel, mode: NumericMode) -> None:
    """Keys and values of layer 0 (embedding, norm, product, bias, norm of heads, rotation), of layer 1, the logits."""
    ours = _computed(CpuModel.load(prepared, mode, 2), "float32")
    expected = _computed(TorchModel.load(prepared, mode), "float32")
    later = LATER_TOLERANCES[mode.activation_bits]

    for half in (0, 1):
        assert _difference(ours[half][0], expected[half][0]) < 5e-5
        assert _difference(ours[half][1], expected[half][1]) < later
    assert _difference(ours[2], expected[2]) < later


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_narrow_caches_agree(prepared: PreparedModel, kv_dtype: str) -> None:
    """Rounded to nearest, half to even, by both: layer 0 holds the same bits but where the sums lay on the border."""
    ours = _computed(CpuModel.load(prepared, NumericMode.F32, 1), kv_dtype)
    expected = _computed(TorchModel.load(prepared, NumericMode.F32), kv_dtype)

    for half in (0, 1):
        assert np.mean(ours[half][0] != expected[half][0]) < 0.01
    assert _difference(ours[2], expected[2]) < 0.02


def test_q4f32_is_f32_with_less_memory(prepared: PreparedModel) -> None:
    """The same bits on each backend where the head's weights are the same too: the groups are the source's own."""
    modes = (NumericMode.F32, NumericMode.Q4F32)
    for models in (
        [CpuModel.load(prepared, mode, 1) for mode in modes],
        [TorchModel.load(prepared, mode) for mode in modes],
    ):
        results = [_computed(model, "float32") for model in models]

        assert [part.tobytes() for part in results[0]] == [part.tobytes() for part in results[1]]


def test_greedy_answers_agree_in_int16(prepared: PreparedModel) -> None:
    """The default mode of 4-bit models: on both backends the same answers."""
    prompts: list[list[int]] = [
        np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist() for length in (3, 20)
    ]
    models = (CpuModel.load(prepared, NumericMode.Q4A16, 2), TorchModel.load(prepared, NumericMode.Q4A16))
    answers = [greedy_answers(model, prompts, 12) for model in models]

    assert answers[0] == answers[1]
