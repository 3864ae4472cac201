"""Everything breaks at random moments, by a seed. Each request has one end, no answer is wrong, nothing leaks."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import chaos_run, chaos_schedule, chaos_verdict
from tests.support.chaos_figures import Figures
from tests.support.chaos_schedule import Schedule

RUN_S = 240.0  # of a long run: long enough for faults to meet, short enough to be looked at
# Where no time is asked for. With all that is before and after it a minute and a half.
SHORT_RUN_S = 30.0
SHORT_SEED = 1  # odd ones bring KV by shared memory, even ones by grpc
MODEL_LOAD = 0.2  # two cores compute some 100 tokens a second
# Set-up, the last answers, and the wait for what was killed last.
OVERHEAD_S = 400.0


def is_model(config: pytest.Config) -> bool:
    """What was asked for."""
    return bool(config.getoption("--chaos-model", default=False))


def schedules(config: pytest.Config) -> list[Schedule]:
    """The short run, or what was asked for."""
    load = MODEL_LOAD if is_model(config) else 1.0
    minutes, seed = config.getoption("--chaos-minutes", default=None), config.getoption("--chaos-seed", default=None)
    left_s, seed = float(round(60.0 * (minutes or SHORT_RUN_S / 60.0))), seed or SHORT_SEED
    found: list[Schedule] = []
    while left_s > 0:
        found.append(chaos_schedule.plan(seed + len(found), min(RUN_S, left_s), load=load))
        left_s -= RUN_S
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test a run."""
    if "schedule" in metafunc.fixturenames:
        found = schedules(metafunc.config)
        metafunc.parametrize("schedule", found, ids=[f"seed {each.seed}, {each.duration_s:.0f} s" for each in found])


@pytest.mark.timeout(RUN_S + OVERHEAD_S)
async def test_one_end_for_each_request_and_nothing_lost_wrong_or_leaked(
    schedule: Schedule, with_model: bool, figures: list[Figures], tmp_path: Path
) -> None:
    """Workers, schedulers and gateways are killed, stopped and drained, links cut and slowed, Redis taken away."""
    if with_model:  # the choices of one question have a seed each
        schedule = replace(schedule, questions=tuple(replace(each, num_choices=1) for each in schedule.questions))
    with chaos_verdict.schedule_shown_if_it_fails(schedule):
        run = await _run(schedule, tmp_path, with_model=with_model)
    chaos_verdict.show(schedule, run)
    figures.append(run)


async def _run(schedule: Schedule, folder: Path, *, with_model: bool) -> Figures:
    async with chaos_run.stage(schedule, folder, is_scripted=not with_model) as stage:
        with _logs_kept_if_it_fails(stage.log_folder, folder / "logs"):
            if with_model:
                answers = await chaos_run.model_answers(stage.cluster, schedule)
            else:
                answers = chaos_run.scripted_answers(schedule)
            done = await chaos_run.play(stage, schedule, answers)
            problems, figures = chaos_verdict.judge(done)
            assert not problems, "\n".join(
                [again(schedule, with_model=with_model), f"logs and transcripts: {folder}", *problems]
            )
    return figures


@contextmanager
def _logs_kept_if_it_fails(logs: Path, kept: Path) -> Generator[None]:
    """Beside the transcripts: the folder of a run is gone with it, or by the tenth run after it."""
    try:
        yield
    except BaseException:
        shutil.copytree(logs, kept)
        raise


@pytest.fixture
def with_model(request: pytest.FixtureRequest) -> bool:
    """The default model in place of the scripted answers."""
    return is_model(request.config)


def again(schedule: Schedule, *, with_model: bool) -> str:
    """How to ask for the same run."""
    asked = f"make chaos SEED={schedule.seed} MINUTES={schedule.duration_s / 60.0:.2f}"
    return f"{asked} CHAOS_ARGS=--chaos-model" if with_model else asked
