"""The `cpu` backend's bits: a row gives the same ones in any company, however it is cut, on any number of threads."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from shared.domain.ids import BlockId
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.model.config import ModelConfig
from shared.model.kernels.cpu.model import CpuModel, cpu_numerics
from shared.model.model import Segment
from shared.model.numerics import NumericMode
from tests.support.cpu_models import GROUPED, WIDE, make_model

pytestmark = pytest.mark.timeout(300)  # the first run on a machine compiles the kernels

MODES = [mode for mode in NumericMode if mode is not NumericMode.BF16]
KINDS = [(mode, "float32") for mode in MODES] + [
    (mode, kv_dtype) for mode in (NumericMode.F32, NumericMode.Q4A16) for kv_dtype in ("float16", "bfloat16")
]
LENGTH = 300  # beyond a segment of keys, and no whole number of tiles, blocks or vectors


def _ids(config: ModelConfig, length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()


def _memory(model: CpuModel, kv_dtype: str, stale: float, *, block_size: int = 16, num_blocks: int = 64) -> KvMemory:
    """Blocks whose slots hold another sequence's old numbers."""
    memory = KvMemory(model.layout(block_size, kv_dtype), num_blocks)
    if kv_dtype == "bfloat16":
        bits = np.float32(stale).view(np.uint32) >> np.uint32(16)
        memory.keys()[...] = memory.values()[...] = bits.astype(np.uint16)
    else:
        memory.keys()[...] = memory.values()[...] = stale
    return memory


def _table(seed: int, count: int = 64) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count)


def _segment(ids: Sequence[int], start: int, table: npt.NDArray[np.int64], *, wanted: bool = True) -> Segment:
    return Segment(token_ids=ids, start=start, block_table=table, want_logits=wanted)


def _written(memory: KvMemory, table: npt.NDArray[np.int64], num_tokens: int) -> bytes:
    blocks = [BlockId(int(block)) for block in table[: -(-num_tokens // memory.layout.block_size)]]
    return memory.read(blocks, layer_start=0, layer_end=memory.layout.num_layers, num_tokens=num_tokens)


def _in_chunks(model: CpuModel, memory: KvMemory, ids: list[int], table: npt.NDArray[np.int64], size: int) -> bytes:
    """Logits of the last token and everything written."""
    logits = np.zeros(0)
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        logits = model.forward(memory, [_segment(chunk, start, table, wanted=start + size >= len(ids))])
    return logits.tobytes() + _written(memory, table, len(ids))


@pytest.mark.parametrize("config", [GROUPED, WIDE], ids=["grouped", "wide"])
@pytest.mark.parametrize(("mode", "kv_dtype"), KINDS)
def test_chunks_threads_and_stale_blocks_change_no_bit(config: ModelConfig, mode: NumericMode, kv_dtype: str) -> None:
    """A prompt whole, and in chunks of 1, 7, 16 and 64, on one thread and on two, over other stale numbers."""
    ids, table = _ids(config, LENGTH, 1), _table(2)
    alone = make_model(config, mode)
    expected = _in_chunks(alone, _memory(alone, kv_dtype, 0.0), ids, table, LENGTH)
    for num_threads in (1, 2):
        model = make_model(config, mode, num_threads=num_threads)
        for size, stale in ((1, 3.5), (7, -2.0), (16, 1e4), (64, 0.0), (LENGTH, -7.0)):
            actual = _in_chunks(model, _memory(model, kv_dtype, stale), ids, table, size)
            assert expected == actual, (num_threads, size)
        model.close()


@pytest.mark.parametrize(("mode", "kv_dtype"), KINDS)
def test_company_changes_no_bit(mode: NumericMode, kv_dtype: str) -> None:
    """Prompts of all lengths packed into one step, then decoded together in another order, against each alone."""
    config = GROUPED
    model = make_model(config, mode, num_threads=2)
    lengths = (1, 15, 16, 17, 33, 70, 129, 257)
    prompts = [_ids(config, length, length) for length in lengths]
    answers = [_ids(config, 5, 100 + length) for length in lengths]
    tables = [np.arange(17 * number, 17 * number + 17) for number in range(len(lengths))]

    def run(groups: Sequence[Sequence[int]]) -> list[bytes]:
        memory = _memory(model, kv_dtype, 1.5, num_blocks=17 * len(lengths))
        seen = [b""] * len(lengths)

        def add(group: Sequence[int], segment_of: Callable[[int], Segment]) -> None:
            for each, logits in zip(group, model.forward(memory, [segment_of(each) for each in group]), strict=True):
                seen[each] += logits.tobytes()

        for group in groups:
            add(group, lambda each: _segment(prompts[each], 0, tables[each]))
            for step in range(5):
                add(group, lambda each, step=step: _segment([answers[each][step]], lengths[each] + step, tables[each]))
        return [seen[each] + _written(memory, tables[each], lengths[each] + 5) for each in range(len(lengths))]

    expected = run([[each] for each in range(len(lengths))])
    assert expected == run([list(range(len(lengths)))])
    assert expected == run([[5, 0, 7], [6, 1], [4, 3, 2]])


@pytest.mark.parametrize("mode", MODES)
def test_decode_batches_are_a_replay_as_one_chunk(mode: NumericMode) -> None:
    """Sequences decoded in batches of 1 to 16 hold what computing all their tokens as one chunk writes."""
    config = GROUPED
    model = make_model(config, mode, num_threads=2)
    ids = [_ids(config, 40, seed) for seed in range(16)]
    tables = [np.arange(3 * number, 3 * number + 3) for number in range(16)]
    memory, replayed = (_memory(model, "float32", stale, num_blocks=48) for stale in (0.0, 9.0))
    model.forward(memory, [_segment(ids[each][:24], 0, tables[each], wanted=False) for each in range(16)])
    for step in range(24, 40):
        batch = step - 23  # the batch grows by one a step; those not in it are computed alone
        model.forward(memory, [_segment([ids[each][step]], step, tables[each]) for each in range(batch)])
        for each in range(batch, 16):
            model.forward(memory, [_segment([ids[each][step]], step, tables[each])])
    for each in range(16):
        model.forward(replayed, [_segment(ids[each], 0, tables[each])])
        assert _written(replayed, tables[each], 40) == _written(memory, tables[each], 40)


def test_a_step_of_more_rows_than_memory_holds_is_the_same(  # several passes inside one call
) -> None:
    """Passes of 16 rows against one of 128, with logits wanted in each, in order."""
    config, mode = GROUPED, NumericMode.Q4A16
    segments = [_segment(_ids(config, length, length), 0, _table(length)) for length in (30, 1, 1, 40, 9)]
    results: list[bytes] = []
    for max_rows in (16, 128):
        model = make_model(config, mode, max_rows=max_rows)
        results.append(model.forward(_memory(model, "float32", 0.0, num_blocks=64), segments[:1]).tobytes())
        memory = _memory(model, "float32", 0.0, num_blocks=64 * 5)
        apart = [
            Segment(token_ids=each.token_ids, start=0, block_table=each.block_table + 64 * place, want_logits=True)
            for place, each in enumerate(segments)
        ]
        logits = model.forward(memory, apart)
        assert logits.shape == (5, config.vocab_size)
        results.append(logits.tobytes())
    assert results[:2] == results[2:]


def test_numbers_that_are_none_stay_in_their_own_sequence() -> None:
    """Stale "not a number" beyond a sequence's end, in its last block, reaches no result."""
    model = make_model(GROUPED, NumericMode.F32)
    ids, table = _ids(GROUPED, 21, 5), _table(6)
    expected = _in_chunks(model, _memory(model, "float32", 0.0), ids, table, 21)
    assert expected == _in_chunks(model, _memory(model, "float32", float("nan")), ids, table, 21)


@pytest.mark.parametrize("block_size", [8, 24, 32, 128])
def test_block_sizes_change_no_bit(block_size: int) -> None:
    """Any multiple of 8 gives the logits of 16."""
    model = make_model(GROUPED, NumericMode.Q4A16, num_threads=2)
    ids, table = _ids(GROUPED, 200, 5), _table(6)
    expected = model.forward(_memory(model, "float32", 0.0), [_segment(ids, 0, table)]).tobytes()
    memory = _memory(model, "float32", 4.0, block_size=block_size)
    assert expected == model.forward(memory, [_segment(ids, 0, table)]).tobytes()


def test_layers_are_told_when_they_are_written() -> None:
    """on_layers rises, leaves out the last, and what it told is in the cache by then; the result has the same bits."""
    model = make_model(WIDE, NumericMode.F32, num_threads=2)
    ids, table = _ids(WIDE, 20, 5), _table(6)
    whole = _memory(model, "float32", 0.0)
    expected = model.forward(whole, [_segment(ids, 0, table)]).tobytes()
    memory = _memory(model, "float32", 0.0)
    told: list[int] = []

    def on_layers(num_layers: int) -> None:
        told.append(num_layers)
        assert memory.keys()[:, :num_layers].tobytes() == whole.keys()[:, :num_layers].tobytes()
        assert memory.values()[:, :num_layers].tobytes() == whole.values()[:, :num_layers].tobytes()

    assert expected == model.forward(memory, [_segment(ids, 0, table)], on_layers).tobytes()
    assert told == [1, 2]


@pytest.mark.parametrize(
    ("block_size", "dtype", "part"), [(12, "float32", "multiple of 8"), (16, "float64", "float64 is not supported")]
)
def test_a_cache_that_the_kernels_do_not_take(block_size: int, dtype: str, part: str) -> None:
    """It is refused when the layout is asked for."""
    with pytest.raises(ValueError, match=part):
        make_model(GROUPED, NumericMode.F32).layout(block_size, dtype)


def test_a_cache_of_another_model() -> None:
    """It is refused before anything is written."""
    model = make_model(GROUPED, NumericMode.F32)
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=64, dtype="float32", block_size=16, numerics=b"")
    memory = KvMemory(layout, 4)
    with pytest.raises(ValueError, match="another model"):
        model.forward(memory, [_segment([1], 0, np.arange(4))])
    assert not memory.data.any()


def test_modes_have_numerics_of_their_own() -> None:
    """Unlike modes never shake hands unless meant to."""
    assert len({cpu_numerics(mode) for mode in MODES}) == len(MODES)
    assert cpu_numerics(NumericMode.Q4A8) == make_model(GROUPED, NumericMode.Q4A8).numerics
