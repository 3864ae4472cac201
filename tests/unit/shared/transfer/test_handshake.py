"""The handshake of a pair, each side alone. Both sides together: tests/contract/test_kv_transfer.py."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from grpc import aio

from shared.codec.kv import layout_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation, TransferId, WorkerId
from shared.domain.worker import KvTarget
from shared.kv.layout import KvLayout
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.transfer import handshake
from shared.transfer.handshake import TRANSPORTS, Acquaintances, Introductions
from shared.transfer.host_proof import HostProof
from shared.wire import kv_pb2, kv_pb2_grpc

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", block_size=16, numerics=b"n")
US = Incarnation(7)


def hello(worker_id: str = "prefill-0", incarnation: int = 1, layout: KvLayout = LAYOUT) -> kv_pb2.TransferHello:
    """A proper one."""
    return kv_pb2.TransferHello(
        worker_id=worker_id,
        incarnation=incarnation,
        receiver_incarnation=US,
        layout=layout_to_wire(layout),
        transports=["nixl", "grpc"],
    )


def test_a_welcome_names_us_and_a_transport_that_both_have() -> None:
    """The best of those offered that we can use; the sender is known from then on."""
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT, transports=TRANSPORTS)

    assert acquaintances.welcome(hello()) == kv_pb2.TransferWelcome(incarnation=US, transport="grpc")
    assert acquaintances.knows(Incarnation(1))
    assert not acquaintances.knows(Incarnation(2))


def test_a_new_start_of_a_worker_replaces_the_one_before() -> None:
    """PDX-05: state of the old start is dropped, other workers are not concerned."""
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT, transports=TRANSPORTS)
    for worker_id, incarnation in (("prefill-0", 1), ("prefill-1", 2), ("prefill-0", 3)):
        acquaintances.welcome(hello(worker_id, incarnation))

    assert [acquaintances.knows(Incarnation(incarnation)) for incarnation in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 32}, "unlike KV layouts: block_size 32 and 16"),
        ({"num_layers": 3, "dtype": "float16"}, "unlike KV layouts: num_layers 3 and 2, dtype float16 and float32"),
        ({"numerics": b"m"}, "unlike KV layouts: numerics differ"),
    ],
)
def test_an_unlike_layout_is_named(change: dict[str, int], message: str) -> None:
    """PDX-03: what differs is said, and the sender stays unknown."""
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT, transports=TRANSPORTS)
    with pytest.raises(ServingError) as caught:
        acquaintances.welcome(hello(layout=replace(LAYOUT, **change)))

    assert caught.value == ServingError(ErrorCode.KV_CORRUPT, message)
    assert not acquaintances.knows(Incarnation(1))


def test_a_hello_to_another_start_or_without_common_transport_is_refused() -> None:
    """The address was taken over by us, or the sender speaks nothing that we do."""
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT, transports=TRANSPORTS)
    to_another, without = hello(), hello()
    to_another.receiver_incarnation = 8
    del without.transports[:]
    for message, code in ((to_another, ErrorCode.STALE_ATTEMPT), (without, ErrorCode.KV_TRANSFER_FAILED)):
        with pytest.raises(ServingError) as caught:
            acquaintances.welcome(message)

        assert caught.value.code is code


def test_the_one_met_longest_ago_is_forgotten_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says hello again when it needs to."""
    monkeypatch.setattr(handshake, "MAX_PEERS", 2)
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT, transports=TRANSPORTS)
    for number in (1, 2, 3):
        acquaintances.welcome(hello(f"prefill-{number}", number))

    assert [acquaintances.knows(Incarnation(number)) for number in (1, 2, 3)] == [False, True, True]


def test_shared_memory_needs_the_token_from_the_senders_memory() -> None:
    """Read, it is the answer; a path that leads nowhere here, or shared memory switched off, means the next best."""
    proof = HostProof()
    asked = hello()
    asked.transports[:] = ["shm", "grpc"]
    asked.shm_proof_path = proof.path
    both = Acquaintances(incarnation=US, layout=LAYOUT, transports=TRANSPORTS)
    without = Acquaintances(incarnation=US, layout=LAYOUT, transports=("grpc",))

    assert both.welcome(asked) == kv_pb2.TransferWelcome(incarnation=US, transport="shm", shm_proof=proof.token)
    assert without.welcome(asked) == kv_pb2.TransferWelcome(incarnation=US, transport="grpc")
    proof.close()
    assert both.welcome(asked) == kv_pb2.TransferWelcome(incarnation=US, transport="grpc")
    asked.transports[:] = ["shm"]
    with pytest.raises(ServingError, match="no common KV transport"):
        both.welcome(asked)


class _Receiver(kv_pb2_grpc.KvTransferServicer):
    """Welcomes everyone as it is told."""

    def __init__(self) -> None:
        self.welcome = kv_pb2.TransferWelcome(incarnation=US)
        self.hellos: list[kv_pb2.TransferHello] = []

    async def Hello(self, request: kv_pb2.TransferHello, context: object) -> kv_pb2.TransferWelcome:
        """As told."""
        self.hellos.append(request)
        return self.welcome


class _Sender:
    """Introductions to a receiver on loopback."""

    def __init__(self, receiver: _Receiver, address: str, channels: ChannelPool, proof: HostProof | None) -> None:
        self.receiver = receiver
        self.metrics = Metrics("prefill", "p")
        self.introductions = Introductions(
            worker_id=WorkerId("p"),
            incarnation=Incarnation(1),
            layout=LAYOUT,
            transports=TRANSPORTS,
            proof=proof,
            channel_for=channels.get,
            metrics=self.metrics,
            log=get_logger("test"),
        )
        self.target = KvTarget(
            worker_id=WorkerId("d"),
            address=address,
            incarnation=US,
            transfer_id=TransferId(1),
            transports=TRANSPORTS,
        )

    def fallbacks(self, reason: str) -> bool:
        """Whether exactly one was counted with this reason."""
        line = f'firsttoken_kv_transport_fallbacks_total{{reason="{reason}"}} 1.0'
        return line in self.metrics.render().decode().splitlines()


@asynccontextmanager
async def sender(proof: HostProof | None) -> AsyncGenerator[_Sender]:
    """A sender and its receiver."""
    receiver = _Receiver()  # pyright: ignore[reportAbstractUsage] - a handshake is all that is asked
    channels = ChannelPool("")

    def add(server: aio.Server) -> None:
        kv_pb2_grpc.add_KvTransferServicer_to_server(receiver, server)

    async with serve(add, host="127.0.0.1", port=0, token="", services=()) as server:
        made = _Sender(receiver, server.address, channels, proof)
        yield made
        await channels.close()
        made.metrics.close()


@pytest.fixture
def proof() -> Iterator[HostProof]:
    """Closed at the end."""
    proof = HostProof()
    yield proof
    proof.close()


async def test_a_proven_pair_uses_shared_memory(proof: HostProof) -> None:
    """Asked once; no fallback is counted."""
    async with sender(proof) as s:
        s.receiver.welcome.transport = "shm"
        s.receiver.welcome.shm_proof = proof.token

        assert ["shm", "shm"] == [await s.introductions.introduce(s.target) for _ in range(2)]
        (asked,) = s.receiver.hellos
        assert (["shm", "grpc"], proof.path) == (list(asked.transports), asked.shm_proof_path)
        assert not s.fallbacks("proof")


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_proof_that_fails_means_the_next_best(proof: HostProof, transport: str) -> None:
    """Whether the receiver could not read the token or has read another one: told, counted, and served by grpc."""
    async with sender(proof) as s:
        s.receiver.welcome.transport = transport
        s.receiver.welcome.shm_proof = b"another"

        assert "grpc" == await s.introductions.introduce(s.target)
        assert s.fallbacks("proof")


async def test_a_transport_that_is_refused_later_is_left_for_good(proof: HostProof) -> None:
    """The pair goes on with the next one; where there is none, that is the end."""
    async with sender(proof) as s:
        s.receiver.welcome.transport = "shm"
        s.receiver.welcome.shm_proof = proof.token
        await s.introductions.introduce(s.target)
        s.introductions.fall_back(s.target, "shm")

        assert "grpc" == await s.introductions.introduce(s.target)
        assert s.fallbacks("refused")
        with pytest.raises(ServingError, match="no common KV transport"):
            s.introductions.fall_back(replace(s.target, transports=("shm",)), "shm")


async def test_without_a_proof_shared_memory_is_not_offered() -> None:
    """The system has none: nothing is asked for, nothing counted."""
    async with sender(None) as s:
        s.receiver.welcome.transport = "grpc"

        assert "grpc" == await s.introductions.introduce(s.target)
        assert (["grpc"], "") == (list(s.receiver.hellos[0].transports), s.receiver.hellos[0].shm_proof_path)
        assert not s.fallbacks("proof")
