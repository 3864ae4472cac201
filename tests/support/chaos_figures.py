"""What runs under fault came to: a line a run, and all of them as the table of docs/reliability.md."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support.chaos_schedule import FaultKind

ENDINGS = {FaultKind.KILL: "kills", FaultKind.FREEZE: "freezes", FaultKind.TERMINATE: "terminations"}
# Seen, and not done.
LATE = {FaultKind.REDIS_LATE: "late answers of Redis", FaultKind.STARVED: "pauses of everything"}
REDIS = {FaultKind.REDIS_KILL: "restarts of Redis as an empty one", FaultKind.REDIS_FREEZE: "pauses of Redis"}
LINKS = {
    "between clients and gateways": (FaultKind.LINK_CUT, FaultKind.LINK_SLOW, FaultKind.LINK_SILENT),
    "to Redis": (FaultKind.REDIS_LINK_CUT, FaultKind.REDIS_LINK_SLOW),
    "between workers and scheduler": (FaultKind.SCHEDULER_LINK_CUT, FaultKind.SCHEDULER_LINK_SILENT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run. `faults` by kind and target."""

    seconds: float
    ends: Mapping[str, int]
    faults: Mapping[tuple[str, str], int]
    requeues: Mapping[str, int]
    resumed: int
    observed: int
    steps_replayed: int
    schedulers: int

    def __str__(self) -> str:
        parts = [f"{name} {count}" for name, count in self.ends.items()]
        parts += [f"{kind} {target} {count}".replace("  ", " ") for (kind, target), count in self.faults.items()]
        parts += [f"requeued {reason} {count}" for reason, count in self.requeues.items()]
        return (
            f"{self.seconds:.0f} s, {sum(self.ends.values())} requests, {self.resumed} resumed, {self.observed} "
            f"observations, {self.steps_replayed} steps of {self.schedulers} schedulers replayed: {', '.join(parts)}"
        )


def table(runs: Sequence[Figures], *, num_failed: int) -> str:
    """Of runs without a finding; `num_failed` are not among them."""
    ends: Counter[str] = Counter()
    faults: Counter[tuple[str, str]] = Counter()
    requeues: Counter[str] = Counter()
    for run in runs:
        ends.update(run.ends)
        faults.update(run.faults)
        requeues.update(run.requeues)
    rows = [
        ("requests", f"{ends.total():,} in {sum(run.seconds for run in runs):.0f} s, {len(runs)} runs: {_ends(ends)}"),
        ("answers resumed", f"{sum(run.resumed for run in runs):,}"),
        *((title, _by_role(faults, kind)) for kind, title in ENDINGS.items()),
        ("Redis", ", ".join(f"{_of_kinds(faults, kind)} {title}" for kind, title in REDIS.items())),
        ("faults of links", ", ".join(f"{_of_kinds(faults, *kinds)} {where}" for where, kinds in LINKS.items())),
        ("the machine itself", ", ".join(f"{_of_kinds(faults, kind)} {title}" for kind, title in LATE.items())),
        ("continued elsewhere", _listed(requeues) + " (attempts by what ended the one before)"),
        ("lost, wrong, doubled answers; wrong counts", "0" if not num_failed else f"see the {num_failed} failed runs"),
        ("leaked", "0" if not num_failed else f"see the {num_failed} failed runs"),
        ("observations against the table", f"{sum(run.observed for run in runs):,}, none outside"),
        (
            "core steps replayed",
            f"{sum(run.steps_replayed for run in runs):,} of {sum(run.schedulers for run in runs)} schedulers, all equal",
        ),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _ends(ends: Counter[str]) -> str:
    plain = [f"{count:,} {name}" for name, count in ends.most_common() if " " not in name]
    coded = Counter({name.removeprefix("failed "): count for name, count in ends.items() if " " in name})
    return ", ".join(plain) + (f", {coded.total():,} failed: {_listed(coded)}" if coded else "")


def _by_role(faults: Counter[tuple[str, str]], kind: FaultKind) -> str:
    roles: Counter[str] = Counter()
    for (name, target), count in faults.items():
        if name == kind.value:
            roles[target.partition("-")[0]] += count
    return f"{roles.total()}: {_listed(roles)}"


def _of_kinds(faults: Counter[tuple[str, str]], *kinds: FaultKind) -> int:
    names = {kind.value for kind in kinds}
    return sum(count for (name, _), count in faults.items() if name in names)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} `{name}`" for name, count in counts.most_common()) or "0"
