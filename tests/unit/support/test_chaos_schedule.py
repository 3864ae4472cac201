"""The schedule of a run under fault."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.chaos_load import CROWD, LONG_REPEAT, Fate, Form
from tests.support.chaos_schedule import (
    BEHIND_A_PROXY,
    FIRST_FAULT_S,
    GATEWAYS,
    SCHEDULERS,
    SEEN,
    SETTLE_S,
    WORKERS,
    FaultKind,
    plan,
)

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
    assert set(FaultKind) - SEEN == {fault.kind for fault in faults}
    assert {"", *SCHEDULERS, *GATEWAYS, *WORKERS} == {fault.target for fault in faults}
    assert set(BEHIND_A_PROXY) == {fault.target for fault in faults if "scheduler-link" in fault.kind}
    for run in runs:
        long = [each for each in run.questions if each.script.repeat == LONG_REPEAT and each.fate is not Fate.STALL]
        assert 2 * CROWD == len(long)


def test_all_kinds_of_clients_have_their_turn() -> None:
    """Over some runs: each form, each fate, at both gateways; deadlines, several choices, deletes at the other one."""
    asked = [question for seed in range(30) for question in plan(seed, 60.0).questions]
    assert set(Form) == {each.form for each in asked}
    assert set(Fate) == {each.fate for each in asked}
    assert {(gateway, by_proxy) for gateway in (0, 1) for by_proxy in (False, True)} == {
        (each.gateway, each.by_proxy) for each in asked
    }
    assert any(each.timeout_s is not None and each.is_resumable for each in asked)
    assert {1, 2} == {each.num_choices for each in asked if each.form is Form.WHOLE}
    assert {1} == {each.num_choices for each in asked if each.form is not Form.WHOLE}
    assert any(each.fate is Fate.DELETE and each.delete_at != each.gateway for each in asked)


def test_a_lighter_load_has_fewer_questions_and_no_crowds() -> None:
    """For a model, which takes its time."""
    light = plan(3, 60.0, load=0.1)
    assert 3 <= len(light.questions) < 40
    long = Counter(question.script.repeat for question in light.questions)[LONG_REPEAT]
    assert long <= Counter(question.fate for question in light.questions)[Fate.STALL]
