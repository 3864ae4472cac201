"""The decoder: the numbers of transformers, and a row's bits the same in any company."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors import torch as safetensors_torch
from transformers import LlamaForCausalLM

from shared.kv.memory import KvMemory
from shared.model.llama import LlamaModel
from shared.model.paging import Segment
from shared.model.prepared import PreparationError

_BLOCK_SIZE = 4
_VOCAB_SIZE = 259


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> LlamaModel:
    """The tiny model in our decoder."""
    return LlamaModel.load(tiny_dir)


def _ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, _VOCAB_SIZE, count).tolist()


def _memory(model: LlamaModel) -> KvMemory:
    """A cache whose blocks hold other sequences' old numbers."""
    memory = KvMemory(model.layout(_BLOCK_SIZE), 96)
    memory.data.view(np.float32)[...] = np.random.default_rng(5).normal(size=(96, memory.layout.block_bytes // 4))
    return memory


def _table(first: int, count: int = 32) -> npt.NDArray[np.int64]:
    """Blocks out of order, so that a mistake in paging shows."""
    return np.arange(first + count - 1, first - 1, -1)


def _segment(ids: list[int], start: int, table: npt.NDArray[np.int64], *, want_logits: bool = True) -> Segment:
    return Segment(token_ids=ids, start=start, block_table=table, want_logits=want_logits)


def _bits(values: npt.NDArray[np.float32]) -> bytes:
    return values.tobytes()


def test_logits_are_those_of_transformers(model: LlamaModel, tiny_model: LlamaForCausalLM) -> None:
    """In chunks and then token by token, against the whole text at once."""
    ids = _ids(40, 1)
    with torch.inference_mode():
        expected = cast("Any", tiny_model)(torch.tensor([ids])).logits[0].numpy()
    memory, table = _memory(model), _table(3)
    for start, end in ((0, 16), (16, 29), *((place, place + 1) for place in range(29, 40))):
        logits = model.forward(memory, [_segment(ids[start:end], start, table)])
        np.testing.assert_allclose(logits[0], expected[end - 1], rtol=1e-4, atol=1e-4)


def test_company_does_not_change_a_bit(model: LlamaModel) -> None:
    """Chunks and single tokens of four sequences: alone, packed, packed in another order, on one thread and on two."""
    prompts = [_ids(count, count) for count in (1, 9, 17, 30)]
    before = torch.get_num_threads()
    seen: dict[int, set[bytes]] = {number: set() for number in range(4)}
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for orders in ([[0], [1], [2], [3]], [[0, 1, 2, 3]], [[3, 1], [2, 0]]):
                memory = _memory(model)
                tables = [_table(24 * number, 24) for number in range(4)]
                results: dict[int, bytes] = dict.fromkeys(range(4), b"")
                for order in orders:
                    prefill = model.forward(memory, [_segment(prompts[each], 0, tables[each]) for each in order])
                    for step in range(3):
                        decode = model.forward(
                            memory, [_segment([step + 5], len(prompts[each]) + step, tables[each]) for each in order]
                        )
                        for place, each in enumerate(order):
                            results[each] += _bits(prefill[place]) + _bits(decode[place])
                for each, table in enumerate(tables):
                    end = len(prompts[each]) + 3
                    blocks = [int(block) for block in table[: -(-end // _BLOCK_SIZE)]]
                    results[each] += memory.read(cast("Any", blocks), layer_start=0, layer_end=2, num_tokens=end)
                    seen[each].add(results[each])
    finally:
        torch.set_num_threads(before)
    assert [len(each) for each in seen.values()] == [1, 1, 1, 1]


def test_only_wanted_logits_and_only_own_blocks(model: LlamaModel) -> None:
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
        (_segment([1], 128, _table(0, 40)), "window"),
        (_segment([1] * 5, 0, _table(0, 1)), "do not fit 1 blocks"),
        (_segment([1], 0, _table(96)), "outside the cache"),
    ],
)
def test_a_segment_that_does_not_fit(model: LlamaModel, segment: Segment, part: str) -> None:
    """It is refused, and nothing is written."""
    memory = _memory(model)
    before = memory.data.copy()
    with pytest.raises(ValueError, match=part):
        model.forward(memory, [_segment([1], 0, _table(60, 1)), segment])
    assert np.array_equal(memory.data, before)


def test_the_layout_tells_models_apart(model: LlamaModel) -> None:
    """Same shape, other weights: another fingerprint."""
    other = LlamaModel.__new__(LlamaModel)
    for name, value in vars(model).items():
        setattr(other, name, "0" * 64 if name == "source_hash" else value)
    assert model.layout(16).token_bytes == 2 * 2 * 2 * 12 * 4
    assert model.layout(16).fingerprint == model.layout(16).fingerprint
    assert other.layout(16).fingerprint != model.layout(16).fingerprint


def test_damaged_weights_are_one_sentence(tiny_dir: Path, tmp_path: Path) -> None:
    """Cut short, or a weight missing."""
    for name in ("firsttoken.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_dir / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_dir / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(PreparationError, match="missing or damaged"):
        LlamaModel.load(tmp_path)
    cast("Any", safetensors_torch).save_file(
        {"model.embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(PreparationError, match="missing or damaged"):
        LlamaModel.load(tmp_path)
