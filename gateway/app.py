"""The gateway put together. Holds no torch; a test looks."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastapi import FastAPI

from gateway.body import BodyReader
from gateway.canceller import Canceller
from gateway.clients.scheduler import SchedulerClient
from gateway.clients.tokens import TokenStreams
from gateway.config import GatewayConfig
from gateway.fleet import FleetView
from gateway.intake import IntakeReader
from gateway.routes import Routes
from gateway.services import Services
from gateway.sessions import Sessions
from gateway.streams import Streams
from shared.aio.scope import spawn
from shared.domain.clock import Clock
from shared.domain.ids import Incarnation
from shared.obs.metrics import Metrics
from shared.rpc.channels import ChannelPool
from shared.state.cancellation import Cancellations
from shared.state.locate import SchedulerLocator
from shared.state.stream_log import StreamLog
from shared.text.chat import ChatTokenizer

# Rendering and tokenising: tokenising, by far the longest part, runs without the interpreter's lock.
_INTAKE_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """An ASGI application and what its main needs of it."""

    app: FastAPI
    sessions: Sessions
    bodies: BodyReader
    fleet: FleetView


@contextlib.asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    *,
    tokenizer: ChatTokenizer,
    locator: SchedulerLocator,
    cancellations: Cancellations | None,
    logs: StreamLog | None = None,
    clock: Clock,
    incarnation: Incarnation,
    metrics: Metrics,
) -> AsyncGenerator[Gateway]:
    """Everything that a request needs, for as long as the body runs; enter and leave it in one task.

    At its end what still runs is cut off: call `sessions.drain` before.
    """
    pool = ChannelPool(config.cluster_token.get_secret_value())
    scheduler = SchedulerClient(locate=locator.locate, pool=pool, incarnation=incarnation, metrics=metrics, clock=clock)
    fleet = FleetView(scheduler, clock)
    with ThreadPoolExecutor(_INTAKE_THREADS, thread_name_prefix="intake") as executor:
        try:
            async with asyncio.TaskGroup() as group:
                sessions = Sessions(group, config.max_open_requests)
                bodies = BodyReader(
                    max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s, draining=sessions.draining
                )
                tokens = TokenStreams(pool, group, metrics)
                services = Services(
                    clock=clock,
                    metrics=metrics,
                    scheduler=scheduler,
                    fleet=fleet,
                    tokens=tokens,
                    canceller=Canceller(scheduler, cancellations),
                    served_model_name=config.served_model_name,
                    logs=logs,
                    resumable_grace_s=config.resumable_grace_s,
                )
                reader = IntakeReader(tokenizer, config.served_model_name)
                routes = Routes(
                    services=services,
                    sessions=sessions,
                    bodies=bodies,
                    reader=reader,
                    streams=Streams(services, sessions, reader),
                    executor=executor,
                    config=config,
                )
                watching = spawn(group, scheduler.watch_place(), name="scheduler watch")
                metrics.active_streams(lambda: sessions.num_streams)
                yield Gateway(app=make_app(routes), sessions=sessions, bodies=bodies, fleet=fleet)
                watching.cancel()
                sessions.close()
                tokens.close()
        finally:
            await pool.close()


def make_app(routes: Routes) -> FastAPI:
    """No documentation pages, no redirects, no middleware: nothing stands between a session and its socket."""
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Our metrics name what we promise; FastAPI's own would come on top, and see prompts in its spans' errors.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    routes.add_to(app)
    return app
