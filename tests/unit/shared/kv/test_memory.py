"""Tests of `shared.kv.memory`."""

import dataclasses

import numpy as np
import pytest

from shared.domain.ids import BlockId
from shared.kv.layout import KvLayout
from shared.kv.memory import ALIGNMENT, KvMemory

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=3, dtype="float32", block_size=4, numerics=b"")
BLOCKS = (BlockId(4), BlockId(1))


def _filled() -> KvMemory:
    memory = KvMemory(LAYOUT, 5)
    numbers = memory.data.view(np.float32)
    numbers[...] = np.arange(1, numbers.size + 1, dtype=np.float32).reshape(numbers.shape)
    return memory


def test_memory_starts_as_zeros() -> None:
    """No block shows what was in memory before."""
    memory = KvMemory(LAYOUT, 5)

    assert (5, LAYOUT.block_bytes) == memory.data.shape
    assert not memory.data.any()


@pytest.mark.parametrize("num_blocks", [1, 5, 333])
def test_memory_begins_at_a_vectors_border(num_blocks: int) -> None:
    """So that a kernel's whole vectors do not straddle cache lines when a block is a multiple of one."""
    assert 0 == KvMemory(LAYOUT, num_blocks).data.ctypes.data % ALIGNMENT


def test_keys_and_values_lie_where_the_layout_says() -> None:
    """[block, layer, kv head, head_dim, slot] and [block, layer, kv head, slot, head_dim], over the same bytes."""
    memory = KvMemory(LAYOUT, 5)
    memory.keys()[4, 1, 1, 0, 3] = np.float32(5.0)
    memory.values()[4, 1, 1, 3, 2] = np.float32(7.0)
    half = 2 * 3 * 4  # numbers
    expected = np.zeros(2 * 2 * half, dtype=np.float32)
    expected[2 * half + 1 * 3 * 4 + 0 * 4 + 3] = 5.0
    expected[3 * half + 1 * 4 * 3 + 3 * 3 + 2] = 7.0

    assert ((5, 2, 2, 3, 4), (5, 2, 2, 4, 3)) == (memory.keys().shape, memory.values().shape)
    assert np.array_equal(expected, memory.data[4].view(np.float32))
    assert not memory.data[:4].any()


def test_what_is_read_can_be_written_elsewhere() -> None:
    """Whole blocks by layer ranges: the target equals the source, and no other block is touched."""
    source, target = _filled(), KvMemory(LAYOUT, 5)
    to_blocks = (BlockId(0), BlockId(3))

    for layer in range(2):
        payload = source.read(BLOCKS, layer_start=layer, layer_end=layer + 1, num_tokens=8)
        target.write(to_blocks, layer_start=layer, layer_end=layer + 1, payload=payload)

    assert np.array_equal(source.data[list(BLOCKS)], target.data[list(to_blocks)])
    assert not target.data[[1, 2, 4]].any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint64"])
def test_slots_beyond_the_last_token_come_out_as_zeros(dtype: str) -> None:
    """5 tokens in two blocks of 4: one valid slot in the second, in every layer, half and head; the source keeps its own."""
    layout = dataclasses.replace(LAYOUT, dtype=dtype)
    source, target = KvMemory(layout, 5), KvMemory(layout, 5)
    source.data[:] = np.arange(source.data.size).reshape(source.data.shape) % 255 + 1
    before = source.data.copy()

    payload = source.read(BLOCKS, layer_start=0, layer_end=2, num_tokens=5)
    target.write(BLOCKS, layer_start=0, layer_end=2, payload=payload)

    assert np.array_equal(source.data[4], target.data[4])
    assert source.keys()[1, ..., :1].tobytes() == target.keys()[1, ..., :1].tobytes()
    assert source.values()[1, :, :, :1].tobytes() == target.values()[1, :, :, :1].tobytes()
    assert not target.keys()[1, ..., 1:].any()
    assert not target.values()[1, :, :, 1:].any()
    assert np.array_equal(before, source.data)


@pytest.mark.parametrize("num_tokens", [4, 9])
def test_tokens_must_end_in_the_last_block(num_tokens: int) -> None:
    """A count that does not belong to the blocks is a bug of the caller."""
    with pytest.raises(ValueError, match="not what 2 blocks hold"):
        _filled().read(BLOCKS, layer_start=0, layer_end=2, num_tokens=num_tokens)


def test_a_payload_of_the_wrong_length_is_refused_whole() -> None:
    """Nothing is written."""
    memory = KvMemory(LAYOUT, 5)

    with pytest.raises(ValueError, match="payload has 3 bytes"):
        memory.write(BLOCKS, layer_start=0, layer_end=1, payload=b"abc")
    assert not memory.data.any()


@pytest.mark.parametrize(("start", "end"), [(0, 3), (1, 1), (-1, 1)])
def test_layers_must_exist(start: int, end: int) -> None:
    """An empty or foreign layer range is refused."""
    with pytest.raises(ValueError, match="layers"):
        _filled().read(BLOCKS, layer_start=start, layer_end=end, num_tokens=8)


def test_reading_into_a_buffer_is_reading() -> None:
    """The same bytes, with zeros beyond the valid slots, and the pool as it was; a buffer of another size is refused."""
    memory = _filled()
    before = memory.data.copy()
    expected = memory.read(BLOCKS, layer_start=1, layer_end=2, num_tokens=6)
    payload = memoryview(bytearray(b"\xee" * len(expected)))
    memory.read_into(payload, BLOCKS, layer_start=1, layer_end=2, num_tokens=6)

    assert expected == bytes(payload)
    assert np.array_equal(before, memory.data)
    with pytest.raises(ValueError, match="payload has"):
        memory.read_into(payload[1:], BLOCKS, layer_start=1, layer_end=2, num_tokens=6)
