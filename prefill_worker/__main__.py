"""`python -m prefill_worker`: computes prompts and brings their KV to decode workers."""

from prefill_worker.config import PrefillConfig
from prefill_worker.worker import run_worker
from shared.aio.threads import in_passing_thread
from shared.domain.request import Role
from shared.engine.build import build_engine
from shared.process import Process, run


async def main(process: Process, config: PrefillConfig) -> None:
    """Loads the model beside the loop, so that /healthz answers meanwhile.

    In a thread that is gone afterwards: OpenMP counts the idle threads of a living one against the cores, and the
    engine's threads would then sleep between any two operations instead of spinning for a moment.
    """
    engine = await in_passing_thread(
        build_engine, config, Role.PREFILL, chunk_tokens=config.prefill_chunk_tokens, clock=process.clock
    )
    process.log.info(engine.pool_note)
    await run_worker(process, config, engine)


if __name__ == "__main__":
    run("prefill", PrefillConfig, main)
