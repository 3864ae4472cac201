"""What a pair of workers settles once, before any request: the same KV layout, and a transport that both can use."""

import asyncio
from collections.abc import Callable

import grpc

from shared.codec.kv import layout_from_wire, layout_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation, WorkerId
from shared.domain.worker import KvTarget
from shared.kv.layout import KvLayout
from shared.wire import kv_pb2, kv_pb2_grpc

GRPC = "grpc"
TRANSPORTS = (GRPC,)  # best first
MAX_PEERS = 1024  # far above a fleet; the one shaken hands with longest ago is forgotten and simply says hello again


class Introductions:
    """The sender's side: says hello to each receiver once per pair of incarnations."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        layout: KvLayout,
        channel_for: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._layout = layout
        self._channel_for = channel_for
        self._known: dict[tuple[str, Incarnation], None] = {}
        self._asking: dict[tuple[str, Incarnation], asyncio.Lock] = {}

    async def introduce(self, target: KvTarget) -> None:
        """Returns when the target knows us; at once when it does already.

        Raises AioRpcError for a refusal, ServingError KV_TRANSFER_FAILED where the answer comes from another process
        than the target names, or names a transport that we lack.
        """
        pair = (target.address, target.incarnation)
        if pair in self._known:
            return
        async with self._asking.setdefault(pair, asyncio.Lock()):
            try:
                if pair not in self._known:
                    await self._say_hello(target)
            finally:
                self._asking.pop(pair, None)  # those who wait hold it themselves
        self._known[pair] = None
        while len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]

    async def _say_hello(self, target: KvTarget) -> None:
        stub = kv_pb2_grpc.KvTransferStub(self._channel_for(target.address))
        welcome = await stub.Hello(
            kv_pb2.TransferHello(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                receiver_incarnation=target.incarnation,
                layout=layout_to_wire(self._layout),
                transports=TRANSPORTS,
            )
        )
        if welcome.incarnation != target.incarnation or welcome.transport not in TRANSPORTS:
            raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "the decode worker has been started anew")

    def forget(self, target: KvTarget) -> None:
        """It says that it does not know us: the next `introduce` says hello again."""
        self._known.pop((target.address, target.incarnation), None)


class Acquaintances:
    """The receiver's side: which sender incarnations have been welcomed. The newest of a worker replaces its last."""

    def __init__(self, *, incarnation: Incarnation, layout: KvLayout) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self._senders: dict[WorkerId, Incarnation] = {}

    def welcome(self, hello: kv_pb2.TransferHello) -> kv_pb2.TransferWelcome:
        """Raises ServingError: STALE_ATTEMPT for a hello to another start of us, KV_CORRUPT for unlike layouts."""
        if hello.receiver_incarnation != self._incarnation:
            raise ServingError(ErrorCode.STALE_ATTEMPT, "the decode worker has been started anew")
        layout = layout_from_wire(hello.layout)
        if layout != self._layout:
            raise ServingError(ErrorCode.KV_CORRUPT, f"unlike KV layouts: {_differences(layout, self._layout)}")
        transport = next((offered for offered in hello.transports if offered in TRANSPORTS), None)
        if transport is None:
            raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "no common KV transport")
        worker_id = WorkerId(hello.worker_id)
        self._senders.pop(worker_id, None)
        self._senders[worker_id] = Incarnation(hello.incarnation)
        while len(self._senders) > MAX_PEERS:
            del self._senders[next(iter(self._senders))]
        return kv_pb2.TransferWelcome(incarnation=self._incarnation, transport=transport)

    def knows(self, incarnation: Incarnation) -> bool:
        return incarnation in self._senders.values()


def _differences(theirs: KvLayout, ours: KvLayout) -> str:
    names = ("num_layers", "num_kv_heads", "head_dim", "dtype", "block_size")
    parts = [
        f"{name} {getattr(theirs, name)} and {getattr(ours, name)}"
        for name in names
        if getattr(theirs, name) != getattr(ours, name)
    ]
    return ", ".join(parts) or "numerics differ"
