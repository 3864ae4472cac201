"""What crosses the scheduler for one answer: decisions, no token, and nothing of a scheduler that has been replaced."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from decode_worker import worker as decode
from decode_worker.config import DecodeConfig
from gateway import __main__ as gateway
from gateway.config import GatewayConfig
from prefill_worker import worker as prefill
from prefill_worker.config import PrefillConfig
from scheduler import __main__ as scheduler
from scheduler.config import SchedulerConfig
from shared.aio.scope import cancel_and_wait, spawn
from shared.domain.refusals import RefusedKind
from shared.engine.build import Engine
from shared.process import Process, RealClock
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.state.client import StateClient
from shared.state.embedded import EmbeddedValkey
from shared.state.leadership import Leadership
from shared.wire import common_pb2, scheduler_pb2
from tests.support import ports
from tests.support.chat import CHAT_PATH, collect, stream_chat
from tests.support.http_client import open_request
from tests.support.polling import eventually
from tests.support.redis_server import CALL_S
from tests.support.refusals import refused, until_refused
from tests.support.script import counting
from tests.support.stepped import SteppedExecutor
from tests.support.worker_pair import scripted_engine

TOKEN = "tapped"
SERVE, SESSION = "/firsttoken.v1.Scheduler/Serve", "/firsttoken.v1.Scheduler/Session"
UP = {SERVE: scheduler_pb2.ServeUp, SESSION: scheduler_pb2.SessionUp}
DOWN = {SERVE: scheduler_pb2.ServeDown, SESSION: scheduler_pb2.SessionDown}
WITH_PROMPT = {"start", "command reserve", "command prefill"}
MAX_TOKENS = 1200


class Tap(grpc.GenericRpcHandler):
    """Stands where everyone looks for the scheduler, passes every call on, keeps the messages of requests."""

    def __init__(self) -> None:
        self.channel: grpc.aio.Channel | None = None
        self.seen: list[Any] = []
        self.epoch = 0
        self._open: dict[str, list[tuple[Any, asyncio.Lock]]] = defaultdict(list)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def forward(messages: AsyncIterator[bytes], context: Any) -> None:
            await self._forward(handler_call_details.method, messages, context)

        # Of bytes; on the wire a call with one message is a stream like any other.
        return cast(Any, grpc.stream_stream_rpc_method_handler(forward))

    async def _forward(self, method: str, messages: AsyncIterator[bytes], context: Any) -> None:
        if self.channel is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no scheduler yet")
        call = cast(Any, self.channel).stream_stream(method)()
        writing = asyncio.Lock()
        self._open[method].append((context, writing))
        try:
            async with asyncio.TaskGroup() as group:
                up = spawn(group, self._pass_up(method, messages, call), name="tap")
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._keep(DOWN.get(method), message)
                    async with writing:
                        await context.write(message)
                await cancel_and_wait(up)
        except* grpc.aio.AioRpcError:
            trailing = tuple(await call.trailing_metadata() or ())
            await context.abort(await call.code(), await call.details(), trailing)
        finally:
            self._open[method].remove((context, writing))
            call.cancel()

    async def say_to_all(self, method: str, message: Any) -> int:
        """As the scheduler would, on every open stream of that kind; on how many."""
        streams = list(self._open[method])
        for context, writing in streams:
            async with writing:
                await context.write(message.SerializeToString())
        return len(streams)

    async def _pass_up(self, method: str, messages: AsyncIterator[bytes], call: Any) -> None:
        async for message in messages:
            self._keep(UP.get(method), message)
            await call.write(message)
        await call.done_writing()

    def _keep(self, kind: Any, message: bytes) -> None:
        if kind is not None:
            parsed = kind.FromString(message)
            self.epoch = max(self.epoch, getattr(parsed, "scheduler_epoch", 0))
            if parsed.WhichOneof("message") != "heartbeat":
                self.seen.append(parsed)

    async def count(self) -> Counter[str]:
        return Counter(name_of(message) for message in self.seen)


def name_of(message: Any) -> str:
    """As `event released`."""
    name = message.WhichOneof("message")
    return f"{name} {getattr(message, name).WhichOneof(name)}" if name in ("event", "command") else name


@asynccontextmanager
async def tapped_system(
    folder: Path, decode_engine: Engine | None = None
) -> AsyncGenerator[tuple[Tap, int, Mapping[str, Process]]]:
    """All four roles in this process, with a tap before the scheduler; and the gateway's port."""
    tap, pool, port = Tap(), ChannelPool(TOKEN), ports.gateway_port()
    processes = {
        name: Process(name, f"{name}-0", RealClock()) for name in ("scheduler", "prefill", "decode", "gateway")
    }
    async with AsyncExitStack() as stack:
        valkey = stack.enter_context(EmbeddedValkey(0, folder))
        state = StateClient(valkey.url, timeout_s=CALL_S)
        stack.push_async_callback(state.close)
        stack.push_async_callback(pool.close)
        server = await stack.enter_async_context(
            serve(
                lambda made: made.add_generic_rpc_handlers((tap,)), host="127.0.0.1", port=0, token=TOKEN, services=()
            )
        )
        common: dict[str, Any] = {
            "cluster_token": TOKEN,
            "redis_url": valkey.url,
            "redis_timeout_s": CALL_S,
            "drain_timeout_s": 5.0,
        }
        peers = {**common, "scheduler": server.address, "scripted": True}
        # Everybody here lives; a machine that stands still for some seconds must not make the scheduler think otherwise.
        patient = {"lease_absent_s": 0.0, "worker_lost_s": 120.0, "step_stall_s": 120.0, "gateway_grace_s": 120.0}
        engines = scripted_engine(1024), decode_engine or scripted_engine(1024)
        mains = {
            "scheduler": scheduler.main(
                processes["scheduler"], SchedulerConfig.model_validate({**common, **patient, "port": 0})
            ),
            "prefill": prefill.run_worker(
                processes["prefill"], PrefillConfig.model_validate({**peers, "port": 0}), engines[0]
            ),
            "decode": decode.run_worker(
                processes["decode"], DecodeConfig.model_validate({**peers, "port": 0}), engines[1]
            ),
            "gateway": gateway.main(processes["gateway"], GatewayConfig.model_validate({**peers, "port": port})),
        }
        async with asyncio.TaskGroup() as group:
            tasks = {name: spawn(group, main, name=name) for name, main in mains.items()}
            location = await eventually(
                Leadership(state, RealClock()).find, lambda found: found is not None, within_s=60.0, what="a scheduler"
            )
            assert location is not None
            tap.channel = pool.get(location.address)
            await eventually(
                processes["gateway"].readiness.ask, lambda told: told[0], within_s=60.0, what="the gateway is ready"
            )
            yield tap, port, processes
            for name in ("gateway", "prefill", "decode", "scheduler"):
                processes[name].stopping.set()
                await asyncio.wait([tasks[name]])
    for process in processes.values():
        process.metrics.close()


async def test_messages_do_not_grow_with_the_answer(tmp_path: Path) -> None:
    """An answer of 1,200 tokens costs the scheduler what one of two costs: the same messages, none with a token."""
    script = counting(4, repeat=MAX_TOKENS)
    counts: list[Counter[str]] = []
    sizes: list[int] = []
    async with tapped_system(tmp_path) as (tap, port, _):
        for num_tokens in (2, 2, MAX_TOKENS):  # the first one greets
            tap.seen.clear()
            answer = await stream_chat(port, script.body(max_tokens=num_tokens))
            assert script.text(num_tokens) == answer.text
            counts.append(
                await eventually(
                    tap.count,
                    lambda count: (count["outcome"], count["event released"]) == (1, 2),
                    within_s=60.0,
                    what="the outcome is told and both workers have released",
                )
            )
            rest = [message for message in tap.seen if name_of(message) not in WITH_PROMPT]
            assert not any("_ids" in str(message) for message in rest)
            sizes.append(sum(message.ByteSize() for message in rest if name_of(message) != "ack"))
    expected = {
        "start": 1,
        "queued": 1,
        "command reserve": 1,
        "event reserved": 1,
        "command prefill": 1,
        "placed": 1,
        "event prefill_done": 1,
        "event kv_committed": 1,
        "event sequence_done": 1,
        "outcome": 1,
        "command release": 2,
        "event released": 2,
    }
    for count in counts[1:]:
        # Several of the six events may share an acknowledgement; one may come when the next request has begun.
        assert 1 <= count.pop("ack") <= 12
        assert expected == count
    # Counts of tokens and blocks take a byte more when they are larger; an id for each token would take 1,200.
    assert abs(sizes[2] - sizes[1]) <= 16


async def test_a_replaced_scheduler_is_refused_by_gateway_and_workers(tmp_path: Path) -> None:
    """It stood still, and wakes on streams that are open: it calls an answer cancelled and has both workers drop it."""
    script = counting(300)
    steps = SteppedExecutor(1024)
    async with tapped_system(tmp_path, steps.engine) as (tap, port, processes):
        async with open_request(port, "POST", CHAT_PATH, body={**script.body(), "stream": True}) as stream:
            steps.permit(3)
            record = await collect(stream, until_deltas=3)
            old = tap.epoch - 1
            key = common_pb2.RequestKey(request_id=record.request_id, attempt=1)
            abort = scheduler_pb2.Command(number=99, key=key, abort=scheduler_pb2.Abort())
            outcome = scheduler_pb2.Outcome(kind=scheduler_pb2.OUTCOME_KIND_CANCELLED)
            said = [
                await tap.say_to_all(SERVE, scheduler_pb2.ServeDown(scheduler_epoch=old, outcome=outcome)),
                await tap.say_to_all(SESSION, scheduler_pb2.SessionDown(scheduler_epoch=old, command=abort)),
            ]
            for name in ("gateway", "prefill", "decode"):
                await until_refused(processes[name].metrics, RefusedKind.STALE_EPOCH)
            steps.run_on()
            await collect(stream, record=record)
        counts = {name: refused(process.metrics) for name, process in processes.items()}

    assert [1, 2] == said
    assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error)
    assert [{RefusedKind.STALE_EPOCH: 1}] * 3 == [counts[name] for name in ("gateway", "prefill", "decode")]
