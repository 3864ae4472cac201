"""One attempt on the prefill worker: its prompt being computed, its KV on the way out. State, no decisions."""

import asyncio
from dataclasses import dataclass, field

from shared.domain.errors import ServingError
from shared.domain.ids import BlockId, Epoch, RequestKey
from shared.domain.request import RequestSpec, SequenceState
from shared.domain.worker import KvTarget
from shared.engine.executor import SampledToken
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import LayersDone
from shared.kv.prefix_cache import CHAIN_START


@dataclass(slots=True, kw_only=True)
class Moments:
    """Monotonic seconds, for the one line that is logged at the end; None = did not happen."""

    received_at: float
    started_at: float | None = None  # blocks found, given to the engine
    computed_at: float | None = None
    acknowledged_at: float | None = None  # token 1 and the last frame
    ended_at: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillJob:
    """A row of the worker's table."""

    key: RequestKey
    spec: RequestSpec
    epoch: Epoch  # of the command: what the events of this attempt answer
    target: KvTarget
    moments: Moments
    deadline: float | None = None  # when the client's time is over
    num_delivered: int = 0  # output tokens that the client has already: above 0 none is sampled here
    distrusts_cache: bool = False  # an earlier attempt's KV was wrong: what is cached of the prompt is computed anew
    blocks: tuple[BlockId, ...] = ()  # none while it waits for them, and none after the end
    block_table: BlockTable | None = None
    is_in_engine: bool = False
    cached_tokens: int = 0  # at the beginning of the prompt: their KV was there, nothing computes it
    computed_upto: int = 0  # positions whose KV is there
    indexed_upto: int = 0  # positions whose blocks others can find
    last_link: bytes = CHAIN_START  # of those
    running: LayersDone | None = None  # how far the chunk behind `computed_upto` was, when last told
    first_token: SampledToken | None = None
    num_reads: int = 0  # of its blocks, by the copy thread, that have not returned
    sent_bytes: int = 0
    is_over: bool = False
    is_sent: bool = False  # decode has acknowledged token 1 and the last frame
    error: ServingError | None = None
    release_epoch: Epoch | None = None  # of the Abort or Release that waits for its answer
    blocks_freed: int = 0
    progressed: asyncio.Event = field(default_factory=asyncio.Event)  # there may be more to send
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # the prompt, and token 1 where it is wanted
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is sent any more

    @property
    def is_computed(self) -> bool:
        return self.computed.is_set()

    @property
    def is_settled(self) -> bool:
        """Over, and nothing touches its blocks any more."""
        return self.is_over and not self.is_in_engine and self.num_reads == 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine has computed."""
        return self.computed_upto - self.cached_tokens

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens that are accepted and not yet computed."""
        return 0 if self.is_over else self.spec.num_prompt_tokens - self.computed_upto

    @property
    def sequence_state(self) -> SequenceState:
        return SequenceState.DONE if self.is_over else SequenceState.RUNNING

    def phases_ms(self) -> dict[str, int]:
        """Lengths of the phases that were reached: waiting for blocks, computing, sending beyond the last step."""
        moments = self.moments
        phases = {
            "queue_ms": (moments.received_at, moments.started_at),
            "compute_ms": (moments.started_at, moments.computed_at),
            "transfer_exposed_ms": (moments.computed_at, moments.acknowledged_at),
            "total_ms": (moments.received_at, moments.ended_at),
        }
        return {
            name: round(max(end - start, 0.0) * 1000)
            for name, (start, end) in phases.items()
            if start is not None and end is not None
        }
