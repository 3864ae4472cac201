"""The scheduler's settings reach its core."""

from scheduler.config import SchedulerConfig
from shared.domain.worker import LossLimits
from shared.settings import load


def test_variables_become_limits() -> None:
    """Every bound of the core that a person may change."""
    environ = {
        "FIRSTTOKEN_MAX_QUEUED_REQUESTS": "7",
        "FIRSTTOKEN_MAX_QUEUED_PROMPT_TOKENS": "70",
        "FIRSTTOKEN_WORKER_LOST_S": "2",
        "FIRSTTOKEN_STEP_STALL_S": "3",
        "FIRSTTOKEN_GATEWAY_GRACE_S": "4",
        "FIRSTTOKEN_RESUMABLE_GRACE_S": "9",
        "FIRSTTOKEN_MAX_RETRIES": "5",
        "FIRSTTOKEN_RETRY_WAIT_S": "6",
        "FIRSTTOKEN_DELIVERED_WAIT_S": "8",
    }

    limits = load(SchedulerConfig, environ).core_limits

    assert (7, 70, LossLimits(silence_s=2.0, step_stall_s=3.0), 4.0, 9.0, 5, 6.0, 8.0) == (
        limits.max_queued_requests,
        limits.max_queued_prompt_tokens,
        limits.loss,
        limits.gateway_grace_s,
        limits.resumable_grace_s,
        limits.max_retries,
        limits.retry_wait_s,
        limits.delivered_wait_s,
    )


def test_the_port_is_the_documented_one() -> None:
    """7000, admin 8000 beside it."""
    config = load(SchedulerConfig, {})

    assert (7000, 8000) == (config.port, config.chosen_admin_port)
