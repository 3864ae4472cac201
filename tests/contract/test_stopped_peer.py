"""A worker that is told to stop while its peer, or itself, stands still: it ends in the time of its drain."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.support.processes import frozen
from tests.support.worker_pair import WorkerPair, key_of, scripted_spec, worker_pair
from tests.support.worker_process import worker_process

DRAIN_S = 1
# Half of it for what ends by itself, then the hand-over, the last reports and the end of servers and threads, each with a
# limit of its own: they are seconds, and a wait without a limit is none.
ENDED_WITHIN_S = DRAIN_S + 40.0
NUM_PROMPT_TOKENS = 1_000
KEY = key_of("r")
pytestmark = pytest.mark.usefixtures("transport")


def _left_below(pair: WorkerPair, limit: int) -> Callable[[], bool]:
    """Fewer prompt tokens than that are left to compute, but some, by the last heartbeat."""

    def is_met() -> bool:
        beats = [up.heartbeat for up in pair.scheduler.ups["prefill-0"] if up.WhichOneof("message") == "heartbeat"]
        return bool(beats) and 0 < beats[-1].queued_prompt_tokens < limit

    return is_met


async def _ends_well(child: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(ENDED_WITHIN_S):
        assert 0 == await child.wait()


async def test_its_receiver_stands_still_in_mid_copy() -> None:
    """Chunks are computed and cannot leave; the attempt is given to others, and nobody waits for the receiver."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS, prefill_ms=20_000)
    async with (
        worker_pair(with_prefill=False, with_decode=False) as pair,
        worker_process(pair, "decode") as decode,
        worker_process(pair, "prefill", drain_timeout_s=DRAIN_S) as prefill,
    ):
        await pair.place(spec)
        await pair.scheduler.until(_left_below(pair, NUM_PROMPT_TOKENS - 100))
        with frozen(decode.pid):
            await pair.scheduler.until(_left_below(pair, NUM_PROMPT_TOKENS - 200))
            prefill.send_signal(signal.SIGTERM)
            failed = (await pair.scheduler.event("prefill-0", KEY, "attempt_failed")).attempt_failed
            assert "DRAINING" == failed.error.code
            await _ends_well(prefill)


async def test_its_receiver_stands_still_before_the_handshake() -> None:
    """The prompt is computed, and not even a stream is open."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with (
        worker_pair(with_prefill=False, with_decode=False) as pair,
        worker_process(pair, "decode") as decode,
        worker_process(pair, "prefill", drain_timeout_s=DRAIN_S) as prefill,
    ):
        reserved = await pair.reserve(spec)
        with frozen(decode.pid):
            await pair.start_prefill(spec, reserved)
            await pair.scheduler.event("prefill-0", KEY, "prefill_done")
            prefill.send_signal(signal.SIGTERM)
            await _ends_well(prefill)


async def test_it_stands_still_itself_in_mid_copy() -> None:
    """Told while it stands still, it wakes up to streams and a session that others have given up by then."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS, prefill_ms=20_000)
    async with (
        worker_pair(with_prefill=False) as pair,
        worker_process(pair, "prefill", drain_timeout_s=DRAIN_S) as prefill,
    ):
        await pair.place(spec)
        await pair.scheduler.until(_left_below(pair, NUM_PROMPT_TOKENS - 100))
        with frozen(prefill.pid):
            await pair.release("decode-0", KEY, abort=True)
            await pair.scheduler.hang_up("prefill-0")
            os.kill(prefill.pid, signal.SIGTERM)
        await _ends_well(prefill)


async def test_a_decode_worker_whose_sender_stands_still_in_mid_copy() -> None:
    """The other way round: its blocks are nobody's any more, and its stream ends without the sender."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS, prefill_ms=20_000)
    async with (
        worker_pair(with_prefill=False, with_decode=False) as pair,
        worker_process(pair, "decode", drain_timeout_s=DRAIN_S) as decode,
        worker_process(pair, "prefill") as prefill,
    ):
        await pair.place(spec)
        await pair.scheduler.until(_left_below(pair, NUM_PROMPT_TOKENS - 100))
        with frozen(prefill.pid):
            decode.send_signal(signal.SIGTERM)
            await pair.scheduler.event("decode-0", KEY, "preempted")
            await _ends_well(decode)
