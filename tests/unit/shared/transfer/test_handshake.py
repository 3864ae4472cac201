"""The handshake of a pair: the receiver's side. Both sides together: tests/contract/test_kv_transfer.py."""

from dataclasses import replace

import pytest

from shared.codec.kv import layout_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation
from shared.kv.layout import KvLayout
from shared.transfer import handshake
from shared.transfer.handshake import Acquaintances
from shared.wire import kv_pb2

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
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT)

    assert acquaintances.welcome(hello()) == kv_pb2.TransferWelcome(incarnation=US, transport="grpc")
    assert acquaintances.knows(Incarnation(1))
    assert not acquaintances.knows(Incarnation(2))


def test_a_new_start_of_a_worker_replaces_the_one_before() -> None:
    """PDX-05: state of the old start is dropped, other workers are not concerned."""
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT)
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
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT)
    with pytest.raises(ServingError) as caught:
        acquaintances.welcome(hello(layout=replace(LAYOUT, **change)))

    assert caught.value == ServingError(ErrorCode.KV_CORRUPT, message)
    assert not acquaintances.knows(Incarnation(1))


def test_a_hello_to_another_start_or_without_common_transport_is_refused() -> None:
    """The address was taken over by us, or the sender speaks nothing that we do."""
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT)
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
    acquaintances = Acquaintances(incarnation=US, layout=LAYOUT)
    for number in (1, 2, 3):
        acquaintances.welcome(hello(f"prefill-{number}", number))

    assert [acquaintances.knows(Incarnation(number)) for number in (1, 2, 3)] == [False, True, True]
