"""Channels to other processes: one for each address, pinged, with the cluster token on every call.

A channel connects by itself and again after a loss. Whoever opens a stream ends it in `finally` (`shared.rpc.calls`):
leaving an `async for` over a call does not.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from shared.rpc.errors import MAX_MESSAGE_BYTES
from shared.rpc.interceptors import TOKEN_METADATA_KEY

PING_INTERVAL_MS = 2000
PING_TIMEOUT_MS = 2000  # with the interval: broken after 4 s of silence (decisions §1)
# A unary call between our processes takes milliseconds; the longest by design is Cancel, which waits 2 s.
DEFAULT_UNARY_TIMEOUT_S = 5.0

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    # The one that counts: with its default of 60 s a link that went silent stayed open whatever the line above says.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0 = no limit: a long prefill sends nothing but pings
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # also the time that one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),  # what is repeated is decided by us, with a request's attempt in hand
    ("grpc.use_local_subchannel_pool", 1),  # closing a channel closes its connection
    ("grpc.enable_http_proxy", 0),  # the environment's `http_proxy` is a way out, not one between our processes
)


class ChannelPool:
    """One channel an address, made at first use. Not for use from several loops."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._channels: dict[str, TokenChannel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """Does not connect yet, never waits."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = TokenChannel(
                grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS), self._token
            )
        return channel

    async def drop(self, address: str) -> None:
        """Closes the channel, if there is one; its calls end with CANCELLED. The next `get` makes a new one."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all channels."""
        for address in list(self._channels):
            await self.drop(address)


class TokenChannel(grpc.aio.Channel):
    """A channel whose calls carry the cluster token, and whose unary calls have a timeout.

    Not a client interceptor: grpc runs an intercepted stream through two more tasks and a queue of its own.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((TOKEN_METADATA_KEY, token),) if token else ()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_unary(method, *args, **kwargs), DEFAULT_UNARY_TIMEOUT_S)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_stream(method, *args, **kwargs), None)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_unary(method, *args, **kwargs), None)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_stream(method, *args, **kwargs), None)

    def _with_token(self, call: Callable[..., Any], timeout_s: float | None) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *self._metadata)
            kwargs.setdefault("timeout", timeout_s)
            return call(*args, **kwargs)

        return start

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        await self.close()
        return None
