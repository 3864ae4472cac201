"""`python -m prefill_worker`: computes prompts and brings their KV to decode workers."""

import asyncio

from prefill_worker.config import PrefillConfig
from prefill_worker.worker import run_worker
from shared.engine.build import build_engine
from shared.process import Process, run


async def main(process: Process, config: PrefillConfig) -> None:
    """Loads the model beside the loop, so that /healthz answers meanwhile."""
    engine = await asyncio.to_thread(
        build_engine,
        model_dir=config.model_dir,
        block_size=config.block_size,
        kv_pool_mib=config.kv_pool_mib,
        chunk_tokens=config.prefill_chunk_tokens,
        num_threads=config.num_threads,
        clock=process.clock,
    )
    await run_worker(process, config, engine)


if __name__ == "__main__":
    run("prefill", PrefillConfig, main)
