"""torch on one thread: two that spin wait for each other, many times as long where a core is busy with something else."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Generator[None]:
    """For the whole process, as long as it is open; then as it was before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
