"""Reads Prometheus text."""

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.support.http_client import exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """All samples of one process at one moment."""

    samples: tuple[Sample, ...]

    def all(self, name: str, **labels: str) -> list[Sample]:
        """Samples of this name that have at least these labels."""
        return [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """Their sum; 0 if there are none."""
        return sum(sample.value for sample in self.all(name, **labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for sample in self.all(name):
            key = sample.labels[label]
            sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    def above(self, name: str, bound: float) -> float:
        """How many observations of a histogram lie above one of its bucket bounds. Raises ValueError if it is no bound."""
        buckets = {float(s.labels["le"]): s.value for s in self.all(f"{name}_bucket")}
        if bound not in buckets:
            raise ValueError(f"{bound} is not among the bounds {sorted(buckets)} of {name}")
        return self.total(f"{name}_count") - buckets[bound]


def parse(text: str) -> Scrape:
    """Raises ValueError if it is not Prometheus text."""
    samples = [
        Sample(name=sample.name, labels=sample.labels, value=sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    return Scrape(tuple(samples))


async def scrape(admin_port: int) -> Scrape:
    """The metrics of one process. Raises OSError if it is not there."""
    answer = await exchange(admin_port, "GET", "/metrics")
    assert 200 == answer.status, answer.body
    return parse(answer.body.decode())
