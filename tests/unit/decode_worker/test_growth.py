"""Who gets blocks and who leaves, as decisions."""

import pytest

from decode_worker.growth import (
    GROW_AHEAD_TOKENS,
    Claim,
    check_fits,
    num_blocks_ahead,
    num_blocks_at_start,
    share_out,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4, numerics=b"n")


def key(name: str, attempt: int = 1) -> RequestKey:
    """A pair."""
    return RequestKey(RequestId(name), Attempt(attempt))


def spec(num_prompt_tokens: int, max_tokens: int) -> RequestSpec:
    """So many tokens."""
    return RequestSpec(
        request_id=RequestId("r"),
        prompt_ids=(TokenId(1),) * num_prompt_tokens,
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=1),
    )


def claim(name: str, num_blocks: int, num_wanted: int = 0, *, is_parked: bool = False, is_fresh: bool = False) -> Claim:
    """By its name: a is the oldest."""
    return Claim(key=key(name), num_blocks=num_blocks, num_wanted=num_wanted, is_parked=is_parked, is_fresh=is_fresh)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "num_delivered", "expected"),
    [
        (4, 100, 0, 2),  # the prompt's block and one more
        (5, 100, 0, 3),
        (5, 100, 4, 12),  # nine tokens are there, and CONTINUED_TOKENS more have room
        (5, 30, 4, 9),  # never more than the whole answer needs
        (5, 3, 0, 2),  # never more than the whole answer needs
        (8, 1, 0, 3),
    ],
)
def test_a_reservation_takes_what_is_there_and_one_block(
    prompt: int, max_tokens: int, num_delivered: int, expected: int
) -> None:
    """Not the whole answer: that would keep blocks from everyone for the longest that it could be."""
    assert expected == num_blocks_at_start(LAYOUT, spec(prompt, max_tokens), num_delivered=num_delivered)


@pytest.mark.parametrize(
    ("last_index", "upto_index", "max_tokens", "expected_tokens"),
    [
        (1, 100, 100, 5 + 1 + GROW_AHEAD_TOKENS),
        (1, 4, 100, 5 + 3),  # token 4 needs tokens 1 to 3 in the cache
        (90, 200, 92, 5 + 91),  # nothing is fed after the last token
        (0, 1, 100, 5),
    ],
)
def test_growth_is_ahead_of_need_and_no_further(
    last_index: int, upto_index: int, max_tokens: int, expected_tokens: int
) -> None:
    """By the fixed number of tokens, but not beyond credit or end."""
    blocks = num_blocks_ahead(LAYOUT, spec(5, max_tokens), last_index=last_index, upto_index=upto_index)

    assert LAYOUT.num_blocks_for(expected_tokens) == blocks


def test_what_no_empty_pool_could_hold_is_refused() -> None:
    """Prompt and longest answer together; one block less is too few."""
    check_fits(LAYOUT, spec(5, 11), pool_blocks=4)
    with pytest.raises(ServingError, match="need 4 KV blocks, the pool has 3") as caught:
        check_fits(LAYOUT, spec(5, 11), pool_blocks=3)

    assert caught.value.code is ErrorCode.NEVER_FITS


def test_enough_for_all_is_given_to_all() -> None:
    """Oldest first; nobody leaves."""
    shares = share_out([claim("c", 2, 1), claim("a", 2, 2), claim("b", 2)], num_available=3, num_returning=0)

    assert shares.grants == ((key("a"), 2), (key("c"), 1))
    assert shares.victims == ()
    assert not shares.is_short


def test_nobody_passes_an_older_one_that_waits() -> None:
    """The blocks that are there are too few for the oldest, and are kept for it."""
    shares = share_out([claim("a", 2, 2), claim("b", 2, 1)], num_available=1, num_returning=9)

    assert (shares.grants, shares.victims, shares.is_short) == ((), (), True)


@pytest.mark.parametrize(
    ("claims", "returning", "expected"),
    [
        ([claim("a", 5, 1), claim("b", 5), claim("c", 5)], 0, ["c"]),  # the youngest
        ([claim("a", 5), claim("b", 5), claim("c", 5, 1)], 0, ["c"]),  # itself, being the youngest
        ([claim("a", 5, is_parked=True), claim("b", 5, 1), claim("c", 5)], 0, ["a"]),  # who waits for his reader
        ([claim("a", 5, 6), claim("b", 3), claim("c", 3)], 0, ["c", "b"]),  # as many as it takes
        ([claim("a", 5, 7), claim("b", 3), claim("c", 3)], 7, []),  # enough comes back anyway
        ([claim("a", 5, 1), claim("b", 5, 1), claim("c", 5, 1)], 0, ["c"]),  # what it gives is enough for both
        ([claim("a", 5, 9), claim("b", 2, 9), claim("c", 2)], 0, ["c", "b", "a"]),  # it cannot go on alone
    ],
)
def test_who_leaves_when_blocks_are_short(claims: list[Claim], returning: int, expected: list[str]) -> None:
    """Parked ones first, then the youngest, until what comes back is enough."""
    shares = share_out(claims, num_available=0, num_returning=returning)

    assert [key(name) for name in expected] == list(shares.victims)
    assert shares.is_short


@pytest.mark.parametrize(
    ("claims", "expected", "awaits_fresh"),
    [
        ([claim("a", 5, 1), claim("b", 5, is_fresh=True)], [], True),  # the oldest waits for it, and stays itself
        ([claim("a", 5, 1), claim("b", 5), claim("c", 5, is_fresh=True)], ["b"], False),  # another one does
        ([claim("a", 5, 7), claim("b", 5), claim("c", 5, is_fresh=True)], ["b"], True),  # but has not enough
        ([claim("a", 5, is_fresh=True), claim("b", 5, 1)], ["b"], False),  # for an older one nobody waits
        ([claim("a", 5, 1), claim("b", 5, is_fresh=True, is_parked=True)], ["b"], False),  # it makes no tokens
        ([claim("a", 5, 1), claim("b", 5, 1, is_fresh=True)], ["b"], False),  # nor does this one
        ([claim("a", 5, 1), claim("b", 5, 1), claim("c", 5, is_fresh=True)], ["b"], False),
        ([claim("a", 5, 1, is_parked=True), claim("b", 5, is_fresh=True)], ["a"], False),  # nobody waits for a reader
    ],
)
def test_who_has_come_back_stays_for_some_tokens(claims: list[Claim], expected: list[str], awaits_fresh: bool) -> None:
    """A replay whose answer leaves at once would be for nothing."""
    shares = share_out(claims, num_available=0, num_returning=0)

    assert [key(name) for name in expected] == list(shares.victims)
    assert (True, awaits_fresh) == (shares.is_short, shares.awaits_fresh)


def test_the_youngest_of_the_parked_goes_first() -> None:
    """Ids sort by admission, and attempts of one request by number."""
    parked = [claim("a", 1, is_parked=True), claim("b", 1, is_parked=True), claim("c", 9), claim("d", 1, 1)]

    assert share_out(parked, num_available=0, num_returning=0).victims == (key("b"),)
