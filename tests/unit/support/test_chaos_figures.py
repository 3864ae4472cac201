"""The table that a long run prints."""

from collections import Counter

from tests.support.chaos_figures import Figures, table


def test_runs_are_added_up_by_role_and_outcome() -> None:
    """Ends by what the client saw, failures by code; faults by role, kinds of links together."""
    run = Figures(
        seconds=40.0,
        ends=Counter({"finished": 5, "cut": 1, "failed no_capacity": 2, "failed timeout": 1}),
        faults=Counter(
            {("kill", "decode-0"): 2, ("kill", "decode-1"): 1, ("kill", "gateway-0"): 1, ("link-cut", "x"): 1}
        ),
        requeues=Counter({"worker_lost": 3}),
        resumed=2,
        observed=1_000,
        steps_replayed=7,
        schedulers=2,
    )
    said = table([run, run], num_failed=0)
    assert "| requests | 18 in 80 s, 2 runs: 10 finished, 2 cut, 6 failed: 4 `no_capacity`, 2 `timeout` |" in said
    assert "| kills | 8: 6 `decode`, 2 `gateway` |" in said
    assert "2 between clients and gateways, 0 to Redis" in said
    assert "| observations against the table | 2,000, none outside |" in said
    assert "| leaked | 0 |" in said
