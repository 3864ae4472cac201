"""What a pair of workers settles once, before any request: the same KV layout, and a transport that both can use.

`shm` needs the proof that they share a host; where it fails, or shared memory turns out not to work later, the pair
goes on with the next transport that both have.
"""

import asyncio
from collections.abc import Callable, Sequence

import grpc
from structlog.typing import FilteringBoundLogger

from shared.codec.kv import layout_from_wire, layout_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation, WorkerId
from shared.domain.worker import KvTarget
from shared.kv.layout import KvLayout
from shared.obs.metrics import Metrics
from shared.transfer.host_proof import HostProof, read_token
from shared.wire import kv_pb2, kv_pb2_grpc

GRPC = "grpc"
SHM = "shm"
TRANSPORTS = (SHM, GRPC)  # all of them, best first
# The proof that both share a host failed; the receiver refused it for a stream; too many segments are in use (for that
# stream alone).
FALLBACK_REASONS = ("proof", "refused", "segments")
MAX_PEERS = 1024  # far above a fleet; the one shaken hands with longest ago is forgotten and simply says hello again


class Introductions:
    """The sender's side: says hello to each receiver once per pair of incarnations."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        layout: KvLayout,
        transports: Sequence[str],
        proof: HostProof | None,
        channel_for: Callable[[str], grpc.aio.Channel],
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        """`transports`: best first; `shm` among them counts only with a `proof` to show."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._layout = layout
        self._transports = tuple(name for name in transports if name != SHM or proof is not None)
        self._proof = proof
        self._channel_for = channel_for
        self._metrics = metrics
        self._log = log
        self._known: dict[tuple[str, Incarnation], str] = {}
        self._asking: dict[tuple[str, Incarnation], asyncio.Lock] = {}

    async def introduce(self, target: KvTarget) -> str:
        """The transport to use, when the target knows us; at once when it does already.

        Raises AioRpcError for a refusal, ServingError KV_TRANSFER_FAILED where the answer comes from another process
        than the target names, or there is no transport that both can use.
        """
        pair = (target.address, target.incarnation)
        if pair not in self._known:
            async with self._asking.setdefault(pair, asyncio.Lock()):
                try:
                    if pair not in self._known:
                        self._known[pair] = await self._say_hello(target)
                finally:
                    self._asking.pop(pair, None)  # those who wait hold it themselves
            while len(self._known) > MAX_PEERS:
                del self._known[next(iter(self._known))]
        return self._known[pair]

    async def _say_hello(self, target: KvTarget) -> str:
        stub = kv_pb2_grpc.KvTransferStub(self._channel_for(target.address))
        welcome = await stub.Hello(
            kv_pb2.TransferHello(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                receiver_incarnation=target.incarnation,
                layout=layout_to_wire(self._layout),
                transports=self._transports,
                shm_proof_path=self._proof.path if self._proof is not None and SHM in self._transports else "",
            )
        )
        if welcome.incarnation != target.incarnation:
            raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "the decode worker has been started anew")
        transport = welcome.transport
        if transport == SHM and not (self._proof and self._proof.is_proven_by(welcome.shm_proof)):
            transport = self.next_best(target, SHM)
        if transport not in self._transports:
            raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "no common KV transport")
        if transport != SHM and SHM in self._transports and SHM in target.transports:
            self._note_fallback(target, "proof", transport)
        self._log.info("handshake", peer=target.worker_id, transport=transport)
        return transport

    def fall_back(self, target: KvTarget, from_transport: str) -> None:
        """It did not work: the next one of both is used from now on. Raises ServingError without any."""
        transport = self.next_best(target, from_transport)
        self._known[target.address, target.incarnation] = transport
        self._note_fallback(target, "refused", transport)

    def next_best(self, target: KvTarget, from_transport: str) -> str:
        """The best transport of both but for that one. Raises ServingError without any."""
        for name in self._transports:
            if name != from_transport and name in target.transports:
                return name
        raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "no common KV transport")

    def _note_fallback(self, target: KvTarget, reason: str, transport: str) -> None:
        self._metrics.kv_transport_fallbacks.add(reason)
        self._log.warning("KV transport falls back", peer=target.worker_id, reason=reason, transport=transport)

    def forget(self, target: KvTarget) -> None:
        """It says that it does not know us: the next `introduce` says hello again."""
        self._known.pop((target.address, target.incarnation), None)


class Acquaintances:
    """The receiver's side: which sender incarnations have been welcomed. The newest of a worker replaces its last."""

    def __init__(self, *, incarnation: Incarnation, layout: KvLayout, transports: Sequence[str]) -> None:
        self._incarnation = incarnation
        self._layout = layout
        self.transports = tuple(transports)
        self._senders: dict[WorkerId, Incarnation] = {}

    def welcome(self, hello: kv_pb2.TransferHello) -> kv_pb2.TransferWelcome:
        """Raises ServingError: STALE_ATTEMPT for a hello to another start of us, KV_CORRUPT for unlike layouts."""
        if hello.receiver_incarnation != self._incarnation:
            raise ServingError(ErrorCode.STALE_ATTEMPT, "the decode worker has been started anew")
        layout = layout_from_wire(hello.layout)
        if layout != self._layout:
            raise ServingError(ErrorCode.KV_CORRUPT, f"unlike KV layouts: {_differences(layout, self._layout)}")
        token = read_token(hello.shm_proof_path) if hello.shm_proof_path else None
        usable = [name for name in self.transports if name != SHM or token is not None]
        transport = next((offered for offered in hello.transports if offered in usable), None)
        if transport is None:
            raise ServingError(ErrorCode.KV_TRANSFER_FAILED, "no common KV transport")
        worker_id = WorkerId(hello.worker_id)
        self._senders.pop(worker_id, None)
        self._senders[worker_id] = Incarnation(hello.incarnation)
        while len(self._senders) > MAX_PEERS:
            del self._senders[next(iter(self._senders))]
        proof = token if transport == SHM else None
        return kv_pb2.TransferWelcome(incarnation=self._incarnation, transport=transport, shm_proof=proof or b"")

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
