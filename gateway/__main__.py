"""`python -m gateway`: wiring, and the order of the drain."""

import asyncio

from gateway.app import Gateway, open_gateway
from gateway.config import GatewayConfig
from gateway.fleet import StatusPage
from gateway.server import GatewayServer
from shared.aio.scope import spawn
from shared.domain.errors import ServingError
from shared.obs.admin import bind
from shared.process import Process, run
from shared.state.cancellation import Cancellations
from shared.state.client import StateClient
from shared.state.leadership import Leadership
from shared.state.locate import SchedulerLocator
from shared.state.stream_log import StreamLog
from shared.text.chat import ChatTokenizer

# Who has connected before the end may still ask, and is answered: its request is on the way. Longer than a busy client
# needs for that; a connection that is only kept in reserve holds the drain up as long.
_LAST_REQUESTS_S = 5.0


async def main(process: Process, config: GatewayConfig) -> None:
    """Serves until told to stop, drains, returns."""
    tokenizer = await asyncio.to_thread(_load_tokenizer, config)
    state = StateClient(config.redis_url, timeout_s=config.redis_timeout_s)
    leadership = None if config.scheduler else Leadership(state, process.clock)
    try:
        async with open_gateway(
            config,
            tokenizer=tokenizer,
            locator=SchedulerLocator(leadership, config.scheduler),
            cancellations=Cancellations(state),
            logs=StreamLog(state),
            clock=process.clock,
            incarnation=process.incarnation,
            metrics=process.metrics,
        ) as gateway:
            await _serve(process, config, gateway, state)
    finally:
        await state.close()


async def _serve(process: Process, config: GatewayConfig, gateway: Gateway, state: StateClient) -> None:
    sock = bind(config.host, config.port)
    host, port = sock.getsockname()[:2]
    literal = f"[{host}]" if ":" in host else host
    page = StatusPage(
        gateway.fleet,
        gateway_id=process.name,
        address=f"http://{literal}:{port}",
        admin_url=lambda: process.admin_url,
        peers=config.peers,
        is_ready=process.readiness.ask,
        redis_url=config.redis_url,
        redis_pid=lambda: _redis_pid(state),
    )
    process.add_admin_route("/status", page)
    server = GatewayServer(gateway.app)
    async with asyncio.TaskGroup() as group:
        spawn(group, server.serve(sockets=[sock]), name="http")
        process.readiness.probe = gateway.fleet.readiness
        process.readiness.set(True)
        process.log.info("serving", address=f"http://{literal}:{port}")
        await process.stopping.wait()
        process.readiness.set(False, "draining")
        ends_at = process.clock.monotonic() + config.drain_timeout_s
        # A client that is refused goes to another gateway.
        await server.end_connections(sock, min(_LAST_REQUESTS_S, config.drain_timeout_s / 4))
        await gateway.sessions.drain(ends_at - process.clock.monotonic())
        server.should_exit = True


def _load_tokenizer(config: GatewayConfig) -> ChatTokenizer:
    return ChatTokenizer.scripted() if config.model_dir is None else ChatTokenizer.load(config.model_dir)


async def _redis_pid(state: StateClient) -> int | None:
    """0 where it does not tell, None where it does not answer."""
    try:
        info = await state.call("INFO", "server")
    except ServingError:
        return None
    for line in bytes(info).decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == "process_id" and value.strip().isdecimal():
            return int(value)
    return 0


if __name__ == "__main__":
    run("gateway", GatewayConfig, main)
