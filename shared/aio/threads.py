"""Blocking work beside the loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


async def in_passing_thread(
    function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """The result of `function`, called in a thread that has ended when this returns.

    Unlike `asyncio.to_thread`, whose threads stay and keep what libraries have tied to them: an OpenMP pool, for one.
    """
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(function, *args, **kwargs))
