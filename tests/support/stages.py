"""Crowds of requests that are held at one stage of their lives, by workers that stand still or by what they ask for."""

import os
import signal
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.cancelling import busy_prefill, live_body, long_decode, wait_for_state
from tests.support.chat import collect
from tests.support.cluster import Cluster
from tests.support.http_client import HttpStream
from tests.support.polling import eventually
from tests.support.processes import frozen
from tests.support.script import Script, counting, padded

STAGES = (
    "queued",
    "placing",
    "waiting for prefill",
    "prefilling",
    "handshake",
    "copying",
    "waiting for commit",
    "decoding",
    "parked",
    "last step",
)
NUM_FILLERS = 3  # of `busy_prefill`
MAX_AT_ONCE = {"queued": 50, "prefilling": 5, "copying": 1, "waiting for commit": 5}
"""What waits for a place would be queued, and that is another stage: a prefill worker is given 512 prompt tokens ahead."""
AT_ONCE = 10
HELD_WITHIN_S = 60.0
_PREFILLING = padded(["x"], num_prompt_tokens=100, prefill_ms=8_000)
_BIG = Script(pieces=["0123456789abcdef" * 256], repeat=5_000)  # 4 KiB a token, so that the sockets hold few of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A crowd. `thaw` lets the worker go on that was stopped for it, if one was."""

    streams: Sequence[HttpStream]
    script: Script
    """That each of them has asked for."""
    thaw: Callable[[], None]
    num_prompt_tokens: int
    """Of all of them together."""
    num_others: int
    """What else lives, and is cancelled at the end."""


def at_once(stage: str) -> int:
    """How many fit."""
    return MAX_AT_ONCE.get(stage, AT_ONCE)


@asynccontextmanager
async def held_at(cluster: Cluster, stage: str, num: int, *, port: int, **parameters: Any) -> AsyncGenerator[Held]:
    """So many streams of the gateway at this port that stay at this stage; `parameters` are of their questions."""
    async with AsyncExitStack() as stack:
        status = await cluster.status()
        decode, prefill = (status.one(role).live_pid for role in ("decode", "prefill"))
        thaw: Callable[[], None] = lambda: None  # noqa: E731 - most stages stop nobody
        streams: list[HttpStream] = []
        asked: list[Script] = []

        async def begin(script: Script, *, is_read: bool = True) -> None:
            """All of them, with nothing of their prompts in any cache."""
            for _ in range(num):
                asked.append(script)
                body = {**script.body(cache_salt=uuid.uuid4().hex), **parameters}
                opening = live_body(cluster, body, port=port, receive_buffer=None if is_read else 8_192)
                streams.append(await stack.enter_async_context(opening))

        match stage:
            case "queued":
                await stack.enter_async_context(busy_prefill(cluster))
                before = (await cluster.status()).requests["queued"]
                await begin(counting(3))
                await wait_for_state(cluster, "queued", before + num)
            case "placing":
                thaw = stack.enter_context(frozen(decode))
                await begin(counting(2))
                await wait_for_state(cluster, "placing", num)
            case "waiting for prefill":
                thaw = stack.enter_context(frozen(prefill))
                await begin(counting(2))
                await wait_for_state(cluster, "prefilling", num)
            case "prefilling":
                await begin(_PREFILLING)
                await wait_for_state(cluster, "prefilling", num)
            case "handshake" | "copying" | "waiting for commit":
                # Decode has promised its blocks to all of them, and stands still from then on: what prefill sends first
                # is not answered, be it its hello, more frames than may be unacknowledged, or all that there are.
                length = {"copying": 400, "waiting for commit": 90}.get(stage, 40)
                if stage == "handshake":
                    decode = await _strangers(cluster, decode)
                with frozen(prefill):
                    await begin(padded(["x"], num_prompt_tokens=length))
                    await wait_for_state(cluster, "prefilling", num)
                    thaw = stack.enter_context(frozen(decode))
                await wait_for_state(cluster, "transferring", num)
            case "decoding":
                await begin(long_decode())
                for stream in streams:
                    await collect(stream, until_deltas=2)
            case "parked":
                await begin(_BIG, is_read=False)
                await eventually(
                    cluster.status,
                    lambda s: s.sequences.get("parked") == num,
                    within_s=HELD_WITHIN_S,
                    what="all are parked",
                )
            case _ if "timeout" in parameters:  # it passes while the end token is computed, whenever that has begun
                await begin(counting(1, step_ms=round(parameters["timeout"] * 1_000) + 1_000))
                for stream in streams:
                    await collect(stream, until_deltas=1)
            case _:  # each is to be cancelled by itself when its end token is being computed
                await begin(counting(2, step_ms=3_000))
        num_others = NUM_FILLERS if stage == "queued" else 0
        yield Held(
            streams=streams,
            script=asked[0],
            thaw=thaw,
            num_prompt_tokens=sum(script.num_prompt_tokens for script in asked),
            num_others=num_others,
        )


async def _strangers(cluster: Cluster, decode: int) -> int:
    """The decode worker is replaced: prefill has not met the new one. Its process id."""
    os.kill(decode, signal.SIGKILL)
    await eventually(
        cluster.status,
        lambda s: [each.pid for each in s.of_role("decode") if each.ready] not in ([], [decode]),
        within_s=HELD_WITHIN_S,
        what="another decode worker",
    )
    return (await cluster.wait_ready(within_s=HELD_WITHIN_S)).one("decode").live_pid
