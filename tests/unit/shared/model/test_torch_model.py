"""The torch backend: the numbers of transformers, and a row's bits the same in any company."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import torch as safetensors_torch

from shared.domain.ids import BlockId
from shared.kv.memory import KvMemory
from shared.model.model import Segment
from shared.model.numerics import NumericMode
from shared.model.prepared import PreparationError, PreparedModel
from shared.model.torch_model import TorchModel

_BLOCK_SIZE = 4
_VOCAB_SIZE = 259


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> TorchModel:
    """The tiny model in our decoder."""
    return TorchModel.load(PreparedModel.load(tiny_dir), NumericMode.F32)


def _ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, _VOCAB_SIZE, count).tolist()


def _memory(model: TorchModel) -> KvMemory:
    """A cache whose blocks hold other sequences' old numbers."""
    memory = KvMemory(model.layout(_BLOCK_SIZE, "float32"), 96)
    memory.data.view(np.float32)[...] = np.random.default_rng(5).normal(size=(96, memory.layout.block_bytes // 4))
    return memory


def _table(first: int, count: int = 32) -> npt.NDArray[np.int64]:
    """Blocks out of order, so that a mistake in paging shows."""
    return np.arange(first + count - 1, first - 1, -1)


def _segment(ids: list[int], start: int, table: npt.NDArray[np.int64], *, want_logits: bool = True) -> Segment:
    return Segment(token_ids=ids, start=start, block_table=table, want_logits=want_logits)


def _bits(values: npt.NDArray[np.float32]) -> bytes:
    return values.tobytes()


def test_logits_are_those_of_transformers(model: TorchModel, tiny_model: Any) -> None:
    """In chunks and then token by token, against the whole text at once."""
    ids = _ids(40, 1)
    with torch.inference_mode():
        expected = tiny_model(torch.tensor([ids])).logits[0].numpy()
    memory, table = _memory(model), _table(3)
    for start, end in ((0, 16), (16, 29), *((place, place + 1) for place in range(29, 40))):
        logits = model.forward(memory, [_segment(ids[start:end], start, table)])
        np.testing.assert_allclose(logits[0], expected[end - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", list(NumericMode))
def test_company_chunks_and_threads_do_not_change_a_bit(tiny_q4: PreparedModel, mode: NumericMode) -> None:
    """Four sequences alone, packed, and packed in another order; in chunks of any size; on one thread and on two."""
    model = TorchModel.load(tiny_q4, mode)
    texts = [_ids(count, count) for count in (1, 9, 17, 30)]
    tables = [_table(24 * number, 24) for number in range(4)]
    before = torch.get_num_threads()
    seen: dict[int, set[bytes]] = {number: set() for number in range(4)}
    try:
        for num_threads, size, orders in (
            (1, 30, [[0], [1], [2], [3]]),
            (2, 30, [[0, 1, 2, 3]]),
            (1, 4, [[3, 1], [2, 0]]),
            (2, 1, [[2, 3, 0, 1]]),
        ):
            torch.set_num_threads(num_threads)
            memory = _memory(model)
            logits: dict[int, bytes] = {}
            for order in orders:
                for start in range(0, max(len(texts[each]) for each in order), size):
                    members = [each for each in order if start < len(texts[each])]
                    segments = [_segment(texts[each][start : start + size], start, tables[each]) for each in members]
                    for each, row in zip(members, model.forward(memory, segments), strict=True):
                        logits[each] = _bits(row)  # the last one stays
            for each, table in enumerate(tables):
                end = len(texts[each])
                blocks = [BlockId(int(block)) for block in table[: -(-end // _BLOCK_SIZE)]]
                kv = bytes(memory.read(blocks, layer_start=0, layer_end=2, num_tokens=end))
                seen[each].add(logits[each] + kv)
    finally:
        torch.set_num_threads(before)
    assert [len(each) for each in seen.values()] == [1, 1, 1, 1]


def test_layers_are_told_when_their_kv_is_written(model: TorchModel) -> None:
    """All but the last, which the return tells; and what is told is in the cache."""
    memory, table = _memory(model), _table(0)
    before = memory.data.copy()
    told: list[tuple[int, list[bool]]] = []

    def on_layers(number: int) -> None:
        changed = (memory.data != before).reshape(96, 2, -1).any(axis=(0, 2))
        told.append((number, changed.tolist()))

    model.forward(memory, [_segment(_ids(6, 2), 0, table)], on_layers)

    assert told == [(1, [True, False])]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.01), ("bfloat16", 0.1)])
def test_narrow_caches(model: TorchModel, dtype: str, tolerance: float) -> None:
    """Half the bytes, nearly the same logits; and a chunk sees its own keys as later steps will: rounded."""
    ids = _ids(20, 4)
    results: list[npt.NDArray[np.float32]] = []
    for size in (20, 7):
        memory = KvMemory(model.layout(_BLOCK_SIZE, dtype), 8)
        assert memory.layout.token_bytes == model.layout(_BLOCK_SIZE, "float32").token_bytes // 2
        segments = [_segment(ids[start : start + size], start, _table(0, 8)) for start in range(0, 20, size)]
        results.append([model.forward(memory, [segment]) for segment in segments][-1][0])
    (exact,) = model.forward(_memory(model), [_segment(ids, 0, _table(0))])

    assert _bits(results[0]) == _bits(results[1])
    assert 0 < np.abs(results[0] - exact).max() < tolerance


def test_only_wanted_logits_and_only_own_blocks(model: TorchModel) -> None:
    """Rows that nobody asked for cost no head, and no byte outside the written positions changes."""
    memory = _memory(model)
    before = memory.data.copy()
    table = _table(10)
    segments = [_segment(_ids(6, 2), 0, table, want_logits=False), _segment(_ids(3, 3), 0, _table(50))]
    assert model.forward(memory, segments).shape == (1, _VOCAB_SIZE)
    assert model.forward(memory, [_segment([1], 6, table, want_logits=False)]).shape == (0, _VOCAB_SIZE)
    touched = {int(block) for block in np.flatnonzero((memory.data != before).any(axis=1))}
    assert touched == {41, 40, 81}
    was = KvMemory(memory.layout, 96)
    was.data[:] = before
    keys, values = (memory.keys() != was.keys())[40], (memory.values() != was.values())[40]
    assert keys.any(axis=(0, 1, 2)).tolist() == [True, True, True, False]
    assert values.any(axis=(0, 1, 3)).tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("segment", "part"),
    [
        (_segment([_VOCAB_SIZE], 0, _table(0)), "vocabulary"),
        (_segment([-1], 0, _table(0)), "vocabulary"),
        (_segment([1], 256, _table(0, 70)), "window"),
        (_segment([1] * 5, 0, _table(0, 1)), "do not fit 1 blocks"),
        (_segment([1], 0, _table(96)), "outside the cache"),
    ],
)
def test_a_segment_that_does_not_fit(model: TorchModel, segment: Segment, part: str) -> None:
    """It is refused, and nothing is written."""
    memory = _memory(model)
    before = memory.data.copy()
    with pytest.raises(ValueError, match=part):
        model.forward(memory, [_segment([1], 0, _table(60, 1)), segment])
    assert np.array_equal(memory.data, before)


def test_the_layout_tells_models_and_modes_apart(tiny_q4: PreparedModel, model: TorchModel) -> None:
    """Same shape, other weights or another mode: another fingerprint."""
    others = [TorchModel.load(tiny_q4, mode) for mode in (NumericMode.F32, NumericMode.Q4A16)]
    layouts = [each.layout(16, "float32") for each in (model, *others)]

    assert model.layout(16, "float32").token_bytes == 2 * 2 * 2 * 64 * 4
    assert model.layout(16, "float32").fingerprint == layouts[0].fingerprint
    assert len({each.fingerprint for each in layouts}) == 3


def test_damaged_weights_are_one_sentence(tiny_dir: Path, tmp_path: Path) -> None:
    """Cut short, of another shape, or a mode that the folder cannot have."""
    for name in ("firsttoken.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    prepared = PreparedModel.load(tmp_path)
    prepared.weights_path.write_bytes((tiny_dir / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(PreparationError, match="missing or damaged"):
        TorchModel.load(prepared, NumericMode.F32)
    cast("Any", safetensors_torch).save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, prepared.weights_path)
    with pytest.raises(PreparationError, match="missing or damaged"):
        TorchModel.load(prepared, NumericMode.F32)
    with pytest.raises(PreparationError, match="has no 4-bit weights"):
        TorchModel.load(PreparedModel.load(tiny_dir), NumericMode.Q4F32)
