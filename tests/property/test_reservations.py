"""Whatever the order of grants, commits, ends and late messages, every block has one holder or none."""

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.reservations import Reservation, Reservations
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId, TransferId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.kv.block_pool import BlockPool

SPEC = RequestSpec(request_id=RequestId("r"), prompt_ids=(TokenId(1),), max_tokens=20, sampling=SamplingParams(seed=1))
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "sign", "commit", "end", "expire"]),
        st.integers(0, 5),
        st.integers(1, 5),
        st.floats(0, 20),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
def test_blocks_are_never_lost_or_shared(operations: list[tuple[str, int, int, float]]) -> None:
    """The pool is whole after every operation, holders never exceed the places, and all ends give all blocks back."""
    pool = BlockPool(8)
    reservations = Reservations(pool=pool, block_size=4, max_sequences=3, lease_s=10)
    held: dict[RequestKey, Reservation] = {}
    now = 0.0
    for name, number, num_blocks, later in operations:
        key = RequestKey(RequestId(f"r{number}"), Attempt(1))
        now += later
        match name:
            case "grant" if key not in held and not reservations.has_ended(key, now):
                granted = reservations.grant(
                    key, SPEC, num_blocks=num_blocks, transfer_id=TransferId(number), attach_ticket=b"", now=now
                )
                if isinstance(granted, Reservation):
                    held[key] = granted
            case "sign":
                reservations.sign(key, now)
            case "commit" if key in held and not held[key].is_committed:
                reservations.commit(key)
            case "end":
                assert reservations.free(key) == (len(held.pop(key).blocks) if key in held else 0)
                reservations.bury(key, now)
            case "expire":
                for expired in reservations.expired(now):
                    assert not held[expired].is_committed
                    assert now - held[expired].last_sign_at >= 10
                    reservations.free(expired)
                    del held[expired]
                    reservations.bury(expired, now)
            case _:
                pass
        pool.check_integrity()
        blocks = [block for reservation in held.values() for block in reservation.blocks]
        assert len(blocks) == len(set(blocks)) == pool.num_blocks - pool.num_free
        assert len(reservations) == len(held) <= 3

    for key in list(held):
        reservations.free(key)
    assert pool.num_free == pool.num_blocks
