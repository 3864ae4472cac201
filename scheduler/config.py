"""Settings of the scheduler."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from scheduler.core import CoreLimits
from shared.domain.worker import LossLimits
from shared.settings import Port, ServiceSettings


class SchedulerConfig(ServiceSettings):
    """FIRSTTOKEN_* variables of `python -m scheduler`."""

    port: Port = 7000
    max_queued_requests: Annotated[int, Field(ge=1)] = 1024  # minutes of work for any pool of this size
    max_queued_prompt_tokens: Annotated[int, Field(ge=1)] = 4_000_000  # 8 bytes each and more: some 150 MB of prompts
    worker_lost_s: Annotated[float, Field(gt=0)] = 5.0  # five missed heartbeats
    step_stall_s: Annotated[float, Field(gt=0)] = 10.0  # far above the longest step, a chunk of 1 s
    # A third worker that fails with the same request is no accident any more.
    max_retries: Annotated[int, Field(ge=0)] = 2
    # One worker may be lost by chance; a request that holds on to a second one's end is taken for its cause.
    max_workers_lost: Annotated[int, Field(ge=1)] = 2
    # Of the failed attempts that no lost worker explains so many are tried again in a minute: a share of the requests
    # that were admitted in it (20 % in Envoy, Finagle and Linkerd), and a few more for a system that has little to do.
    retry_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    retry_floor: Annotated[int, Field(ge=0)] = 10
    # A request whose worker was lost waits for another until its deadline; one without a deadline so long: `up` has
    # started a new one by then.
    retry_wait_s: Annotated[float, Field(gt=0)] = 30.0
    # The gateway cancels for a reader that stands still after 60 s; what takes longer is a gateway that is stuck.
    delivered_wait_s: Annotated[float, Field(gt=0)] = 90.0
    gateway_grace_s: Annotated[float, Field(gt=0)] = 5.0  # one that lives has dialled again by then
    resumable_grace_s: Annotated[float, Field(gt=0)] = (
        30.0  # a client that was cut off has found another gateway by then
    )
    # Redis must be seen without a lease for this long, so that a scheduler that still lives comes first (decisions §3).
    # 0 only where no second scheduler can exist.
    lease_absent_s: Annotated[float, Field(ge=0)] = 3.0
    # A folder for a file of every input of the core, prompts as token ids included: for tests and for finding faults.
    core_transcripts: Path | None = None

    @property
    def core_limits(self) -> CoreLimits:
        return CoreLimits(
            max_queued_requests=self.max_queued_requests,
            max_queued_prompt_tokens=self.max_queued_prompt_tokens,
            loss=LossLimits(silence_s=self.worker_lost_s, step_stall_s=self.step_stall_s),
            gateway_grace_s=self.gateway_grace_s,
            resumable_grace_s=self.resumable_grace_s,
            max_retries=self.max_retries,
            max_workers_lost=self.max_workers_lost,
            retry_share=self.retry_share,
            retry_floor=self.retry_floor,
            retry_wait_s=self.retry_wait_s,
            delivered_wait_s=self.delivered_wait_s,
        )
