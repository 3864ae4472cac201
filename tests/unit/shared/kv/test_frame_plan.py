"""Tests of `shared.kv.frame_plan`."""

import pytest

from shared.kv import frame_plan
from shared.kv.frame_plan import FramePlan, LayersDone, plan_frames
from shared.kv.frames import FrameRange
from shared.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=1, dtype="uint64", block_size=4, numerics=b"")
NUM_TOKENS = 10  # two whole blocks of 256 bytes, 64 a layer, and one of two tokens


def _range(layer_start: int, layer_end: int, token_start: int, token_end: int) -> FrameRange:
    return FrameRange(layer_start=layer_start, layer_end=layer_end, token_start=token_start, token_end=token_end)


def test_whole_blocks_share_a_frame_while_they_fit() -> None:
    """Blocks of 256 bytes in frames of 512: two blocks a frame, all layers, the last frame ends with the tokens."""
    expected = (_range(0, 4, 0, 8), _range(0, 4, 8, 16), _range(0, 4, 16, 18))

    assert expected == plan_frames(LAYOUT, 0, 18, max_payload_bytes=600)


def test_a_block_that_is_too_large_goes_by_layers() -> None:
    """Layers of 64 bytes in frames of 200: three layers, then the fourth, block by block."""
    expected = (_range(0, 3, 4, 8), _range(3, 4, 4, 8), _range(0, 3, 8, 10), _range(3, 4, 8, 10))

    assert expected == plan_frames(LAYOUT, 4, 10, max_payload_bytes=200)


def test_nothing_to_send_makes_no_frame() -> None:
    """A chunk that only took time sends nothing."""
    assert () == plan_frames(LAYOUT, 8, 8)


def test_a_plan_must_start_at_a_block_and_fit() -> None:
    """A start inside a block, and a layer of a block above the frame's limit, are refused."""
    with pytest.raises(ValueError, match="do not start at a block"):
        plan_frames(LAYOUT, 2, 8)
    with pytest.raises(ValueError, match="one layer of a block"):
        plan_frames(LAYOUT, 0, 8, max_payload_bytes=63)


def test_some_layers_go_by_themselves() -> None:
    """Two layers of two blocks are 256 bytes: one frame; what is no range of layers is refused."""
    assert (_range(1, 3, 4, 10),) == plan_frames(LAYOUT, 4, 10, layer_start=1, layer_end=3, max_payload_bytes=256)
    for layer_start, layer_end in ((2, 2), (-1, 2), (2, 5)):
        with pytest.raises(ValueError, match="are not layers"):
            plan_frames(LAYOUT, 4, 10, layer_start=layer_start, layer_end=layer_end)


def test_chunks_leave_in_whole_blocks_and_the_last_with_the_prompt() -> None:
    """What fills no block waits; the partly filled one leaves at the end of the prompt; nothing is named twice."""
    plan = FramePlan(LAYOUT, NUM_TOKENS, ())

    assert () == plan.advance(3, None)
    assert (_range(0, 4, 0, 4),) == plan.advance(7, None)
    assert () == plan.advance(7, None)
    assert (_range(0, 4, 4, 10),) == plan.advance(10, None)
    assert () == plan.advance(10, None)


def test_what_is_held_is_not_planned() -> None:
    """Neither what is held from the start on nor a frame that is held whole; ranges without sense count for nothing."""
    held = (_range(0, 4, 0, 4), _range(0, 2, 4, 8), _range(0, 9, 0, 10), _range(0, 4, 8, 9))
    plan = FramePlan(LAYOUT, NUM_TOKENS, held, max_payload_bytes=256)

    assert (_range(0, 4, 4, 8), _range(0, 4, 8, 10)) == plan.advance(10, None)
    assert () == FramePlan(LAYOUT, NUM_TOKENS, (_range(0, 4, 0, 10),)).advance(10, None)
    rest = FramePlan(LAYOUT, NUM_TOKENS, (_range(0, 4, 4, 10),), max_payload_bytes=256)
    assert (_range(0, 4, 0, 4),) == rest.advance(10, None)


def test_layers_of_the_last_chunk_leave_at_once() -> None:
    """Whatever their size; the rest follows when the chunk is done, and only that."""
    plan = FramePlan(LAYOUT, NUM_TOKENS, ())
    assert (_range(0, 4, 0, 8),) == plan.advance(8, None)

    def layers(num_layers: int) -> LayersDone:
        return LayersDone(token_end=10, num_layers=num_layers, is_last=True)

    assert (_range(0, 1, 8, 10),) == plan.advance(8, layers(1))
    assert () == plan.advance(8, layers(1))
    assert (_range(1, 3, 8, 10),) == plan.advance(8, layers(3))
    assert (_range(3, 4, 8, 10),) == plan.advance(10, layers(3))
    assert () == plan.advance(10, layers(3))


def test_layers_of_other_chunks_wait_until_they_are_worth_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of two blocks has 128 bytes: two layers together are worth 200, the last ones leave with the chunk."""
    monkeypatch.setattr(frame_plan, "MIN_LAYER_GROUP_BYTES", 200)
    plan = FramePlan(LAYOUT, 20, ())

    def layers(num_layers: int) -> LayersDone:
        return LayersDone(token_end=11, num_layers=num_layers, is_last=False)

    assert () == plan.advance(0, layers(1))
    assert (_range(0, 2, 0, 8),) == plan.advance(0, layers(2))
    assert () == plan.advance(0, layers(3))
    assert (_range(2, 4, 0, 8), _range(0, 4, 8, 12)) == plan.advance(12, layers(3))


def test_all_layers_told_ahead_leave_nothing_to_follow() -> None:
    """An executor that tells its last layer as well makes no empty frame."""
    plan = FramePlan(LAYOUT, NUM_TOKENS, ())

    assert (_range(0, 4, 0, 10),) == plan.advance(0, LayersDone(token_end=10, num_layers=4, is_last=True))
    assert () == plan.advance(10, None)


def test_a_chunk_that_was_skipped_by_the_reports_leaves_whole() -> None:
    """Layers of the second chunk are told when the first has not left yet: first the first, then those layers."""
    plan = FramePlan(LAYOUT, NUM_TOKENS, ())

    assert (_range(0, 4, 0, 4), _range(0, 2, 4, 10)) == plan.advance(
        4, LayersDone(token_end=10, num_layers=2, is_last=True)
    )
    assert (_range(2, 4, 4, 10),) == plan.advance(10, None)
