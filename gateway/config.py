"""Settings of the gateway."""

from typing import Annotated

from pydantic import Field

from shared.settings import ModelSettings, Port


class GatewayConfig(ModelSettings):
    """FIRSTTOKEN_* of the process that clients talk to."""

    port: Port = 8000
    peers: str = ""  # admin URLs of the system's other gateways, with commas: `firsttoken status` asks them too
    # A prompt that fills a window of 128k tokens has well under 1 MiB of text; JSON escapes can make six bytes of one.
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    # From the headers to its last byte: 1 MiB at 280 kbit/s, a poor mobile uplink. Half a body keeps a place that long.
    body_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    # Proxies and browsers give up on an idle connection after 30 to 60 s; half of the smaller one.
    keep_alive_s: Annotated[float, Field(gt=0)] = 15.0
    # A phone that changes from one network to another is back within it.
    stall_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    # What OpenAI's client waits for; on two slow cores a window of 8k tokens takes half of it.
    default_timeout_s: Annotated[float, Field(gt=0)] = 600.0  # of a request that says nothing
    max_timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # who asks for more gets this
    # A client that was cut off has found another gateway by then; the scheduler waits as long for a gateway.
    resumable_grace_s: Annotated[float, Field(gt=0)] = 30.0
    # Twice the scheduler's queue: what is over it would be refused there anyway, but costs memory here first.
    max_open_requests: Annotated[int, Field(ge=1)] = 2048
