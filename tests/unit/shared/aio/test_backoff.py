import pytest

from shared.aio.backoff import Backoff


def test_doubles_to_its_bound_and_starts_again() -> None:
    """With the largest random numbers the delays are the bounds themselves."""
    backoff = Backoff(initial_s=1.0, max_s=5.0, random=lambda: 1.0)
    delays = [backoff.next_delay() for _ in range(5)]
    backoff.reset()

    assert [1.0, 2.0, 4.0, 5.0, 5.0] == delays
    assert 1.0 == backoff.next_delay()


def test_jitter_stays_in_the_upper_half() -> None:
    """Peers that start together spread out, but nobody hurries."""
    assert 0.5 == Backoff(initial_s=1.0, max_s=1.0, random=lambda: 0.0).next_delay()


@pytest.mark.parametrize(("initial_s", "max_s"), [(0.0, 1.0), (2.0, 1.0)])
def test_bad_bounds(initial_s: float, max_s: float) -> None:
    """A delay of zero would be a busy loop."""
    with pytest.raises(ValueError, match="initial_s"):
        Backoff(initial_s=initial_s, max_s=max_s, random=lambda: 0.0)
