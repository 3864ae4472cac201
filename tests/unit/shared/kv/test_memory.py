"""Tests of `shared.kv.memory`."""

import numpy as np
import pytest

from shared.domain.ids import BlockId
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=3, dtype="float32", block_size=4, numerics=b"")
BLOCKS = (BlockId(4), BlockId(1))


def _filled() -> KvMemory:
    memory = KvMemory(LAYOUT, 5)
    view = memory.view()
    view[...] = np.arange(1, view.size + 1, dtype=np.float32).reshape(view.shape)
    return memory


def test_memory_starts_as_zeros() -> None:
    """No block shows what was in memory before."""
    memory = KvMemory(LAYOUT, 5)

    assert (5, LAYOUT.block_bytes) == memory.data.shape
    assert not memory.data.any()


def test_view_has_the_layouts_axes() -> None:
    """[block, layer, K|V, kv head, slot, head_dim], over the same bytes."""
    memory = KvMemory(LAYOUT, 5)
    memory.view()[4, 1, 1, 1, 3, 2] = np.float32(7.0)

    assert (5, 2, 2, 2, 4, 3) == memory.view().shape
    assert np.float32(7.0).tobytes() == memory.data[4, -4:].tobytes()


def test_what_is_read_can_be_written_elsewhere() -> None:
    """Whole blocks by layer ranges: the target equals the source, and no other block is touched."""
    source, target = _filled(), KvMemory(LAYOUT, 5)
    to_blocks = (BlockId(0), BlockId(3))

    for layer in range(2):
        payload = source.read(BLOCKS, layer_start=layer, layer_end=layer + 1, num_tokens=8)
        target.write(to_blocks, layer_start=layer, layer_end=layer + 1, payload=payload)

    assert np.array_equal(source.data[list(BLOCKS)], target.data[list(to_blocks)])
    assert not target.data[[1, 2, 4]].any()


def test_slots_beyond_the_last_token_come_out_as_zeros() -> None:
    """5 tokens in two blocks of 4: one valid slot in the second, in every layer, half and head; the source keeps its own."""
    source, target = _filled(), KvMemory(LAYOUT, 5)
    before = source.data.copy()

    payload = source.read(BLOCKS, layer_start=0, layer_end=2, num_tokens=5)
    target.write(BLOCKS, layer_start=0, layer_end=2, payload=payload)

    assert np.array_equal(source.view()[4], target.view()[4])
    assert np.array_equal(source.view()[1, :, :, :, :1], target.view()[1, :, :, :, :1])
    assert not target.view()[1, :, :, :, 1:].any()
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
