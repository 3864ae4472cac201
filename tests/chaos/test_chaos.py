"""Everything breaks at random moments, by a seed. Each request has one end, no answer is wrong, nothing leaks."""

from pathlib import Path

import pytest

from tests.support import chaos_run, chaos_schedule, chaos_verdict
from tests.support.chaos_schedule import Schedule

RUN_S = 240.0  # of a long run: long enough for faults to meet, short enough to be looked at
SHORT_RUN_S = 50.0
SHORT_SEEDS = (1, 2)  # odd ones bring KV by shared memory, even ones by grpc
# Set-up, the last answers, and the wait for what was killed last.
OVERHEAD_S = 180.0


def schedules(config: pytest.Config) -> list[Schedule]:
    """The short runs of the test suite, or what was asked for."""
    minutes, seed = config.getoption("--chaos-minutes", None), config.getoption("--chaos-seed", None)
    if minutes is None and seed is None:
        return [chaos_schedule.plan(seed, SHORT_RUN_S) for seed in SHORT_SEEDS]
    left_s, seed = 60.0 * (minutes or SHORT_RUN_S / 60.0), seed or 1
    found: list[Schedule] = []
    while left_s > 0:
        found.append(chaos_schedule.plan(seed + len(found), min(RUN_S, left_s)))
        left_s -= RUN_S
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test a run."""
    if "schedule" in metafunc.fixturenames:
        found = schedules(metafunc.config)
        metafunc.parametrize("schedule", found, ids=[f"seed {each.seed}, {each.duration_s:.0f} s" for each in found])


@pytest.mark.timeout(RUN_S + OVERHEAD_S)
async def test_one_end_for_each_request_and_nothing_lost_wrong_or_leaked(schedule: Schedule, tmp_path: Path) -> None:
    """Workers and scheduler are killed and stopped, links cut and slowed, Redis taken away, clients leave."""
    bodies = {each.number: (each.script.body(), each.script.text()) for each in schedule.questions}
    with chaos_verdict.schedule_shown_if_it_fails(schedule):
        async with chaos_run.stage(schedule, tmp_path) as stage:
            done = await chaos_run.play(stage, schedule, bodies)
            problems, figures = chaos_verdict.judge(done)
        assert [] == problems, again(schedule)
    chaos_verdict.show(schedule, figures)


def again(schedule: Schedule) -> str:
    """How to ask for the same run."""
    return f"make chaos SEED={schedule.seed} MINUTES={schedule.duration_s / 60.0:.2f}"
