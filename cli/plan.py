"""Which processes `firsttoken up` runs, with which command and environment. Pure: starts nothing, reads nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from shared.settings import ADMIN_PORT_OFFSET, ENV_PREFIX

TORCH = "torch"
MAX_WORKERS = 64  # of one role on one machine; a typing mistake should not start a thousand interpreters
MAX_GATEWAYS = 16  # they only carry text; their ports are neighbours

# Threads that wait spin for so many turns and then sleep: long enough to bridge two operations of one step, too
# short to keep the other worker from its core (without a bound that cost a step up to 320 ms). docs/performance.md.
QUIET_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"}
# What gRPC's C core says of connections that come and go would stand unformatted among the services' JSON lines.
QUIET_RPC = {"GRPC_VERBOSITY": "ERROR"}
# A service maps a prepared folder: it never looks for a model elsewhere.
NO_HUB = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# `up` decides these itself: one that happens to be set around it must not reach a single service.
OWN_SETTINGS = (
    "HOST",
    "PORT",
    "ADMIN_PORT",
    "PEERS",
    "CLUSTER_TOKEN",
    "REDIS_URL",
    "SCHEDULER",
    "WORKER_ID",
    "MODEL_DIR",
    "SCRIPTED",
)


class DrainStage(IntEnum):
    """Lower ones are told to stop first and have ended before the next are told."""

    EDGE = 0  # the gateways: finish their streams while the others still serve them
    CORE = 1  # scheduler and workers
    STATE = 2  # Redis


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process: `child_id` names it in notes, log files and (for workers) in the system."""

    child_id: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    stage: DrainStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What was asked for. `model_dir` None = the scripted generator; `numeric_mode` None = the model's own."""

    port: int
    num_gateways: int
    num_prefill: int
    num_decode: int
    redis_url: str
    is_redis_own: bool
    model_dir: Path | None
    numeric_mode: str | None
    served_model_name: str
    cluster_token: str
    num_cores: int

    def threads(self, backend: str) -> dict[str, int]:
        """Threads of a worker by module.

        On the `cpu` backend all cores for everyone: its threads take work as they come to it and never wait for one
        whose core was taken, so two workers share the cores without a rule (docs/performance.md). torch's threads do
        wait for each other: there each role has half of the cores, shared by its workers.
        """
        if backend != TORCH:
            return {"prefill_worker": self.num_cores, "decode_worker": self.num_cores}
        return {
            "prefill_worker": max(1, (self.num_cores + 1) // 2 // self.num_prefill),
            "decode_worker": max(1, self.num_cores // 2 // self.num_decode),
        }

    @property
    def ports(self) -> tuple[int, ...]:
        """Of the gateways: neighbours."""
        return tuple(range(self.port, self.port + self.num_gateways))

    @property
    def admin_urls(self) -> tuple[str, ...]:
        """Of the gateways."""
        return tuple(f"http://127.0.0.1:{port + ADMIN_PORT_OFFSET}" for port in self.ports)

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the gateways."""
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)


def base_environ(around: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what `up` decides; other FIRSTTOKEN_ settings (pool sizes, log level) pass."""
    own = {ENV_PREFIX + name for name in OWN_SETTINGS}
    kept = {name: value for name, value in around.items() if name.upper() not in own}
    return {**QUIET_THREADS, **QUIET_RPC, **NO_HUB, **kept, "PYTHONUNBUFFERED": "1"}


def plan_services(deployment: Deployment, around: Mapping[str, str]) -> tuple[ChildSpec, ...]:
    """Scheduler, workers, gateways, in the order of their start. The kernel chooses all ports but the gateways'."""
    common = {
        **base_environ(around),
        f"{ENV_PREFIX}HOST": "127.0.0.1",
        f"{ENV_PREFIX}CLUSTER_TOKEN": deployment.cluster_token,
        f"{ENV_PREFIX}REDIS_URL": deployment.redis_url,
        f"{ENV_PREFIX}SERVED_MODEL_NAME": deployment.served_model_name,
    }
    if deployment.is_redis_own:
        # No second scheduler can exist here, and one that is started again comes after the end of the one before.
        common[f"{ENV_PREFIX}LEASE_ABSENT_S"] = "0"
    if deployment.model_dir is None:
        common[f"{ENV_PREFIX}SCRIPTED"] = "true"
    else:
        common[f"{ENV_PREFIX}MODEL_DIR"] = str(deployment.model_dir)
    if deployment.numeric_mode is not None:
        common[f"{ENV_PREFIX}NUMERIC_MODE"] = deployment.numeric_mode

    def service(child_id: str, module: str, stage: DrainStage, port: int, admin_port: int) -> ChildSpec:
        ports = {f"{ENV_PREFIX}PORT": str(port), f"{ENV_PREFIX}ADMIN_PORT": str(admin_port)}
        return ChildSpec(
            child_id=child_id,
            command=(sys.executable, "-P", "-m", module),
            environ={**common, **ports, f"{ENV_PREFIX}WORKER_ID": child_id},
            stage=stage,
        )

    threads = deployment.threads(around.get(f"{ENV_PREFIX}BACKEND", "").lower())

    def worker(child_id: str, module: str) -> ChildSpec:
        spec = service(child_id, module, DrainStage.CORE, 0, 0)
        # What was set around `up` counts.
        return replace(spec, environ={f"{ENV_PREFIX}NUM_THREADS": str(threads[module]), **spec.environ})

    def gateway(number: int, port: int) -> ChildSpec:
        spec = service(f"gateway-{number}", "gateway", DrainStage.EDGE, port, port + ADMIN_PORT_OFFSET)
        peers = [url for place, url in enumerate(deployment.admin_urls) if place != number]
        return replace(spec, environ={**spec.environ, f"{ENV_PREFIX}PEERS": ",".join(peers)})

    return (
        service("scheduler-0", "scheduler", DrainStage.CORE, 0, 0),
        *(worker(f"prefill-{number}", "prefill_worker") for number in range(deployment.num_prefill)),
        *(worker(f"decode-{number}", "decode_worker") for number in range(deployment.num_decode)),
        *(gateway(number, port) for number, port in enumerate(deployment.ports)),
    )
