"""Settings of a prefill worker."""

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from shared.settings import Port, WorkerSettings


class PrefillConfig(WorkerSettings):
    """FIRSTTOKEN_* of the process that computes prompts."""

    port: Port = 7100
    # A cancel waits for one chunk at most, and decode gets its first frame after one; smaller ones compute slower.
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 64
    # Four prompts take turns, a chunk of each; on a GPU they share a step, and with it the weights that it reads.
    token_budget: Annotated[int, Field(ge=1)] = 256
    # How long a step after idleness waits for company. On a CPU a chunk alone costs about its share of a full step, so
    # waiting gains nothing; where a step is mostly fixed cost (a GPU) a few milliseconds do.
    prefill_fill_wait_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0
    # Held at once, those that are only being sent included: the scheduler gives two token budgets ahead, and short
    # prompts have a dozen tokens.
    max_sequences: Annotated[int, Field(ge=1)] = 256

    @field_validator("prefill_chunk_tokens")
    @classmethod
    def _check_chunk(cls, chunk_tokens: int, info: ValidationInfo) -> int:
        block_size = info.data.get("block_size")
        if block_size is not None and chunk_tokens % block_size:
            raise ValueError(f"must be a multiple of the block size, {block_size}")
        return chunk_tokens
