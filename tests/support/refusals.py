"""What has been refused and counted, by kind (`shared.domain.refusals`)."""

from shared.domain.refusals import RefusedKind
from shared.obs.metrics import REFUSED_TOTAL, Metrics
from tests.support.metrics import Scrape, parse
from tests.support.polling import eventually


def refused(source: Metrics | Scrape) -> dict[str, int]:
    """Kind -> count of one process; a `RefusedKind` is such a key."""
    scraped = parse(source.render().decode()) if isinstance(source, Metrics) else source
    return {kind: int(count) for kind, count in scraped.by(REFUSED_TOTAL, "kind").items()}


async def until_refused(metrics: Metrics, kind: RefusedKind, count: int = 1) -> None:
    """Waits until a process of this test has counted so many. Raises AssertionError if it does not."""

    async def now() -> dict[str, int]:
        return refused(metrics)

    await eventually(now, lambda counts: counts.get(kind, 0) >= count, within_s=60.0, what=f"{count} {kind.value}")
