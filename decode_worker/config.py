"""Settings of a decode worker."""

from typing import Annotated

from pydantic import Field

from shared.settings import Port, WorkerSettings


class DecodeConfig(WorkerSettings):
    """FIRSTTOKEN_* of the process that generates tokens."""

    port: Port = 7200
    # A step over 64 rows of the default model takes about as long on a CPU as a person reads a token; with the scripted
    # generator 128 leave room for the 100 streams that must run at once.
    max_sequences: Annotated[int, Field(ge=1)] = 128
    # About 10 s of reading speed: a phone that loses its network for that long stops nobody's sequence.
    outbox_tokens: Annotated[int, Field(ge=1)] = 256
    outbox_bytes: Annotated[int, Field(ge=4)] = 65536  # what 256 tokens never reach; the bound for larger settings
