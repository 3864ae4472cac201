"""`python -m decode_worker`: generates tokens from the KV that prefill workers bring."""

import asyncio

from decode_worker.config import DecodeConfig
from decode_worker.worker import run_worker
from shared.engine.build import build_engine
from shared.process import Process, run


async def main(process: Process, config: DecodeConfig) -> None:
    """Loads the model beside the loop, so that /healthz answers meanwhile."""
    engine = await asyncio.to_thread(
        build_engine,
        model_dir=config.model_dir,
        block_size=config.block_size,
        kv_pool_mib=config.kv_pool_mib,
        chunk_tokens=config.block_size,
        num_threads=config.num_threads,
        clock=process.clock,
    )
    await run_worker(process, config, engine)


if __name__ == "__main__":
    run("decode", DecodeConfig, main)
