"""The sending end of a hand-over, pure: which frames a prompt makes, and when each may leave.

Chunks are computed one after another, layers inside a chunk as well. A chunk that is done leaves in whole blocks; of
the one that is being computed the layers that are done may leave already (see `FramePlan`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.kv.frames import Coverage, FrameRange
from shared.kv.layout import KvLayout

MAX_FRAME_BYTES = 1 << 20  # a quarter of gRPC's default message limit; large enough that per-message cost is small
# While a prompt goes on, its layers leave in pieces of at least this: a frame costs both ends some 70 us beside its
# bytes, which 256 KiB take about as long to copy and sum as. The last chunk's leave at once: they are waited for.
MIN_LAYER_GROUP_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersDone:
    """Of the chunk in the step that runs, up to position `token_end`: the KV of the first `num_layers` is written."""

    token_end: int
    num_layers: int
    is_last: bool


def plan_frames(
    layout: KvLayout,
    token_start: int,
    token_end: int,
    *,
    layer_start: int = 0,
    layer_end: int | None = None,
    max_payload_bytes: int = MAX_FRAME_BYTES,
) -> tuple[FrameRange, ...]:
    """The frames of tokens [token_start, token_end) in layers [layer_start, layer_end), None = to the last.

    In order: whole blocks while they fit, else one block by layers. `token_start` starts a block. One layer of one
    block that is larger than a frame cannot be sent: ValueError.
    """
    layer_end = layout.num_layers if layer_end is None else layer_end
    if token_start % layout.block_size or token_end < token_start:
        raise ValueError(f"tokens [{token_start}, {token_end}) do not start at a block")
    if not 0 <= layer_start < layer_end <= layout.num_layers:
        raise ValueError(f"layers [{layer_start}, {layer_end}) are not layers of {layout.num_layers}")
    if layout.layer_block_bytes > max_payload_bytes:
        raise ValueError(f"one layer of a block has {layout.layer_block_bytes} bytes, a frame {max_payload_bytes}")
    num_layers = layer_end - layer_start
    num_blocks_a_frame = max(max_payload_bytes // (num_layers * layout.layer_block_bytes), 1)
    num_layers_a_frame = min(max_payload_bytes // layout.layer_block_bytes, num_layers)
    step = num_blocks_a_frame * layout.block_size
    return tuple(
        FrameRange(
            layer_start=layer,
            layer_end=min(layer + num_layers_a_frame, layer_end),
            token_start=start,
            token_end=min(start + step, token_end),
        )
        for start in range(token_start, token_end, step)
        for layer in range(layer_start, layer_end, num_layers_a_frame)
    )


class FramePlan:
    """What of a prompt has been planned on one stream, and what may follow.

    All layers of positions below `planned_upto`, and of the chunk behind them, up to `ahead_upto`, the first
    `num_ahead` layers, which the rest follows when the chunk is done.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_prompt_tokens: int,
        held: Sequence[FrameRange],
        *,
        max_payload_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """`held` are the ranges that the receiver names; those that make no sense count for nothing."""
        self._layout = layout
        self._max_payload_bytes = max_payload_bytes
        self._num_prompt_tokens = num_prompt_tokens
        self._coverage = Coverage(layout, num_prompt_tokens)
        for there in held:
            if self._coverage.problem_with(there) is None:
                self._coverage.add(there)
        self._planned_upto = self._coverage.num_prefix_tokens
        self._ahead_upto = self._planned_upto
        self._num_ahead = 0

    def advance(self, computed_upto: int, running: LayersDone | None) -> tuple[FrameRange, ...]:
        """The frames that may leave now and have not been named before; what is held is left out.

        `computed_upto`: positions with their KV in all layers. `running`: the chunk behind them, as far as it is.
        """
        planned: list[FrameRange] = []
        ready = self._whole_blocks(computed_upto)
        if ready > self._planned_upto:
            if self._num_ahead:
                planned += self._plan(self._planned_upto, self._ahead_upto, self._num_ahead, self._layout.num_layers)
                self._planned_upto = self._ahead_upto
                self._num_ahead = 0
            planned += self._plan(self._planned_upto, ready, 0, self._layout.num_layers)
            self._planned_upto = self._ahead_upto = ready
        if running is not None and running.token_end > computed_upto:
            planned += self._plan_ahead(running)
        return tuple(frame for frame in planned if not self._coverage.holds(frame))

    def _plan_ahead(self, running: LayersDone) -> tuple[FrameRange, ...]:
        end = self._whole_blocks(running.token_end)
        num_layers = running.num_layers - self._num_ahead
        num_blocks = self._layout.num_blocks_for(end) - self._planned_upto // self._layout.block_size
        num_bytes = num_layers * num_blocks * self._layout.layer_block_bytes
        if num_bytes <= 0 or (num_bytes < MIN_LAYER_GROUP_BYTES and not running.is_last):
            return ()
        planned = self._plan(self._planned_upto, end, self._num_ahead, running.num_layers)
        self._ahead_upto = end
        self._num_ahead = running.num_layers
        return planned

    def _plan(self, token_start: int, token_end: int, layer_start: int, layer_end: int) -> tuple[FrameRange, ...]:
        if layer_start == layer_end or token_start == token_end:
            return ()
        return plan_frames(
            self._layout,
            token_start,
            token_end,
            layer_start=layer_start,
            layer_end=layer_end,
            max_payload_bytes=self._max_payload_bytes,
        )

    def _whole_blocks(self, upto: int) -> int:
        """The last block may be partly filled only where the prompt ends."""
        return upto if upto == self._num_prompt_tokens else upto - upto % self._layout.block_size
