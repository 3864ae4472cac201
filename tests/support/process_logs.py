"""What the processes of a cluster have written of a request."""

import asyncio
import json
from typing import Any

from tests.support.cluster import Cluster
from tests.support.polling import eventually


async def logged(cluster: Cluster, child_id: str, event: str, request_id: str) -> list[dict[str, Any]]:
    """The lines of one process, by the event's name."""
    folder = cluster.log_folder
    assert folder is not None
    text = await asyncio.to_thread((folder / f"{child_id}.log").read_text)
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be in the middle of being written
    said = [json.loads(line) for line in lines if request_id in line]
    return [line for line in said if line["event"] == event]


async def num_attempts(cluster: Cluster, request_id: str) -> int:
    """Of a request that has ended, by the scheduler's log: its line may come a moment after the client's last byte."""
    (ended,) = await eventually(
        lambda: logged(cluster, "scheduler-0", "request ended", request_id),
        bool,
        within_s=60.0,
        what="the scheduler has said how the request ended",
    )
    return int(ended["attempts"])
