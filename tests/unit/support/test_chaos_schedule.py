"""The schedule of a run under fault."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.chaos_schedule import CROWD, CROWD_REPEAT, FIRST_FAULT_S, SETTLE_S, FaultKind, plan

ROOT = Path(__file__).parents[3]


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    """Else nobody could ask for a run that failed again."""
    code = "from tests.support.chaos_schedule import plan; print(plan(11, 50.0))"
    # A hash seed of its own, and the tests' folder, which an installed package does not bring.
    environ = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert f"{plan(11, 50.0)}\n" == said
    assert plan(11, 50.0) == plan(11, 50.0)


def test_another_seed_and_another_duration_are_other_runs() -> None:
    """And not the same one cut short."""
    first = plan(11, 50.0)
    assert first.faults != plan(12, 50.0).faults
    assert first.faults != plan(11, 51.0).faults


@pytest.mark.parametrize("seed", range(20))
def test_everything_lies_within_the_run(seed: int) -> None:
    """Questions in order and numbered; no fault begins before the first answers or in the last seconds."""
    schedule = plan(seed, 60.0)
    times = [question.at_s for question in schedule.questions]
    assert sorted(times) == times
    assert list(range(len(times))) == [question.number for question in schedule.questions]
    assert max(times) < 60.0
    assert all(FIRST_FAULT_S <= fault.at_s < 60.0 - SETTLE_S for fault in schedule.faults)
    assert ("shm" if seed % 2 else "grpc") == schedule.transport


def test_all_kinds_and_all_processes_have_their_turn() -> None:
    """Over some runs; and each run has its crowds."""
    runs = [plan(seed, 60.0) for seed in range(30)]
    faults = [fault for run in runs for fault in run.faults]
    assert set(FaultKind) == {fault.kind for fault in faults}
    names = {"", "scheduler-0", "gateway-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert names == {fault.target for fault in faults}
    for run in runs:
        assert 2 * CROWD == Counter(question.script.repeat for question in run.questions)[CROWD_REPEAT]


def test_a_lighter_load_has_fewer_questions_and_no_crowds() -> None:
    """For a model, which takes its time."""
    light = plan(3, 60.0, load=0.1)
    assert 3 <= len(light.questions) < 40
    assert 0 == Counter(question.script.repeat for question in light.questions)[CROWD_REPEAT]
