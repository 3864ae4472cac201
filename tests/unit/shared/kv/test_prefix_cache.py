"""Tests of `shared.kv.prefix_cache`."""

import pytest

from shared.domain.ids import BlockId, TokenId
from shared.kv.block_pool import BlockPool, BlockState
from shared.kv.prefix_cache import PrefixCache
from tests.support.cost import Cost, cost_of

SIZE = 4


def _tokens(text: str) -> tuple[TokenId, ...]:
    return tuple(TokenId(ord(letter)) for letter in text)


class Worker:
    """A pool with its cache, and the life of a prompt on it."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, SIZE)

    def match(self, text: str, *, salt: int = 0, max_tokens: int = 1000) -> tuple[BlockId, ...]:
        """Who matches frees at once: the test asks for what is there."""
        found = self.cache.match(_tokens(text), salt=salt, max_tokens=max_tokens)
        self.pool.free(found)
        self.cache.check_integrity()
        return found

    def compute(self, text: str, *, salt: int = 0) -> tuple[BlockId, ...]:
        """All blocks of the text computed anew, offered to the cache, given back."""
        blocks = self.hold(text, salt=salt)
        self.pool.free(blocks)
        self.cache.check_integrity()
        return blocks

    def hold(self, text: str, *, salt: int = 0) -> tuple[BlockId, ...]:
        """The same, still held."""
        blocks = self.pool.reserve(-(-len(text) // SIZE))
        assert blocks is not None
        self.pool.activate(blocks)
        self.cache.insert(_tokens(text), salt=salt, block_ids=blocks)
        self.cache.check_integrity()
        return blocks


def test_whole_blocks_of_an_equal_beginning_are_found() -> None:
    """Not the last one, which is not full; and only as far as the tokens are the same."""
    worker = Worker()
    blocks = worker.compute("aaaabbbbccccdd")

    assert 3 == len(worker.cache)
    assert blocks[:3] == worker.match("aaaabbbbccccdd")
    assert blocks[:3] == worker.match("aaaabbbbcccc and on")
    assert blocks[:2] == worker.match("aaaabbbbcccx")
    assert blocks[:1] == worker.match("aaaabbb")
    assert () == worker.match("aaa")
    assert () == worker.match("xaaabbbbcccc")
    assert () == worker.match("bbbbcccc")


@pytest.mark.parametrize(("max_tokens", "expected"), [(12, 3), (11, 2), (8, 2), (7, 1), (3, 0), (0, 0), (-1, 0)])
def test_a_match_is_not_longer_than_asked(max_tokens: int, expected: int) -> None:
    """The caller says how much it can use: prefill computes at least the last token itself."""
    worker = Worker()
    blocks = worker.compute("aaaabbbbcccc")

    assert blocks[:expected] == worker.match("aaaabbbbcccc", max_tokens=max_tokens)


def test_nothing_is_found_under_another_salt() -> None:
    """Tenants' prefixes do not mix; each salt has its own blocks for the same tokens."""
    worker = Worker()
    first = worker.compute("aaaabbbb", salt=1)

    assert () == worker.match("aaaabbbb", salt=2)
    assert () == worker.match("aaaabbbb", salt=0)
    second = worker.compute("aaaabbbb", salt=2**64 - 1)
    assert (first, second) == (worker.match("aaaabbbb", salt=1), worker.match("aaaabbbb", salt=2**64 - 1))


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    """The KV of a token depends on all before it."""
    worker = Worker()
    first, second = worker.compute("aaaacccc"), worker.compute("bbbbcccc")

    assert first == worker.match("aaaacccc")
    assert second == worker.match("bbbbcccc")
    assert 4 == len(worker.cache)


def test_a_match_holds_its_blocks() -> None:
    """They are not given to anyone else until they are freed; the same again for a second holder."""
    worker = Worker(2)
    blocks = worker.compute("aaaabbbb")
    found = worker.cache.match(_tokens("aaaabbbb"), salt=0, max_tokens=8)
    again = worker.cache.match(_tokens("aaaabbbb"), salt=0, max_tokens=4)

    assert (blocks, blocks[:1]) == (found, again)
    assert worker.pool.reserve(1) is None
    worker.pool.free(found)
    assert (BlockState.ACTIVE, BlockState.CACHED) == (worker.pool.state(blocks[0]), worker.pool.state(blocks[1]))
    worker.cache.check_integrity()


def test_the_first_of_two_equal_blocks_stays() -> None:
    """Two prompts computed side by side: the second one's blocks become free, its own tail is found after the first's."""
    worker = Worker()
    first, second = worker.hold("aaaabbbb"), worker.hold("aaaabbbbcccc")
    worker.pool.free(second)
    worker.pool.free(first)

    assert (*first, second[2]) == worker.match("aaaabbbbcccc")
    assert 3 == worker.pool.counts()[BlockState.CACHED]


def test_an_evicted_beginning_hides_its_rest_until_it_is_there_again() -> None:
    """Nothing matches through a missing parent."""
    worker = Worker(5)
    first, second = worker.hold("aaaabbbb"), worker.hold("aaaabbbbcccc")
    worker.pool.free(first)  # its blocks are the ones that are filed, and now the oldest
    worker.pool.free(second)
    taken = worker.pool.reserve(4)
    assert taken is not None
    worker.cache.check_integrity()

    assert [2, 0] == [worker.cache.take_evictions(), worker.cache.take_evictions()]
    assert () == worker.match("aaaabbbbcccc")
    worker.pool.activate(taken)
    worker.cache.insert(_tokens("aaaabbbb"), salt=0, block_ids=taken[:2])
    worker.pool.free(taken)
    assert (*taken[:2], second[2]) == worker.match("aaaabbbbcccc")


def test_a_prompt_is_inserted_piece_by_piece() -> None:
    """Each insert goes on where the one before ended, and gives what one insert of the whole would."""
    worker = Worker()
    text = "aaaabbbbccccdddd"
    blocks = worker.pool.reserve(4)
    assert blocks is not None
    worker.pool.activate(blocks)
    link = worker.cache.insert(_tokens(text[:8]), salt=3, block_ids=blocks[:2])
    assert blocks[:2] == worker.match(text, salt=3)
    link = worker.cache.insert(_tokens(text[8:]), salt=3, block_ids=blocks[2:], after=link)

    assert blocks == worker.match(text, salt=3)
    assert link == worker.cache.insert(_tokens(text), salt=3, block_ids=blocks)
    assert 4 == len(worker.cache)


def _same_link(_link: bytes, _piece: bytes, _salt: int) -> bytes:
    return b"always the same."


def test_a_digest_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all digests are equal, tokens and beginnings are still told apart."""
    worker = Worker()
    monkeypatch.setattr("shared.kv.prefix_cache._next_link", _same_link)
    blocks = worker.compute("aaaa")

    assert blocks == worker.match("aaaa")
    assert () == worker.match("bbbb")
    assert blocks == worker.match("aaaaaaaa")


def test_what_is_withdrawn_is_not_found_and_not_kept() -> None:
    """Wrong KV: its blocks are free when their holders have gone; the same tokens may be computed and filed anew."""
    worker = Worker()
    good, bad = worker.compute("aaaa"), worker.hold("bbbbccccd")
    worker.cache.withdraw(bad)
    worker.cache.withdraw(bad)

    assert () == worker.match("bbbbcccc")
    assert good == worker.match("aaaa")
    anew = worker.compute("bbbbcccc")
    assert anew == worker.match("bbbbcccc")
    worker.pool.free(bad)
    assert {BlockState.FREE} == {worker.pool.state(block) for block in bad}
    worker.cache.check_integrity()


def test_missing_blocks_are_a_bug_of_the_caller() -> None:
    """More whole blocks of tokens than blocks."""
    worker = Worker()
    with pytest.raises(ValueError, match="1 blocks for 2 blocks of tokens"):
        worker.cache.insert(_tokens("aaaabbbb"), salt=0, block_ids=(BlockId(0),))


def _lives(num_blocks: int) -> Cost:
    worker = Worker(num_blocks)
    for number in range(num_blocks // 4):
        worker_blocks = worker.pool.reserve(4)
        assert worker_blocks is not None
        worker.pool.activate(worker_blocks)
        worker.cache.insert(_tokens(f"{number:016d}"), salt=0, block_ids=worker_blocks)
        worker.pool.free(worker_blocks)

    def live() -> None:
        for salt in range(1, 4):
            blocks = worker.pool.reserve(4)
            assert blocks is not None
            worker.pool.activate(blocks)
            worker.cache.insert(_tokens("aaaabbbbccccdddd"), salt=salt, block_ids=blocks)
            worker.pool.free(worker.cache.match(_tokens("aaaabbbbccccdddd"), salt=salt, max_tokens=16))
            worker.pool.free(blocks)
            worker.pool.free(worker.pool.reserve(8) or ())

    live()
    return cost_of(live)


def test_no_call_costs_more_in_a_larger_pool() -> None:
    """The same lines run, and no memory by the size of the pool is touched, with 100 cached blocks and with 20,000."""
    small, large = _lives(100), _lives(20_000)

    assert small.num_lines == large.num_lines
    assert large.peak_bytes < 20_000
