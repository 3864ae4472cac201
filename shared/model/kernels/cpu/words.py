"""Words of memory, plain and atomic, and the ways to wait, for compiled code without the interpreter's lock."""

import platform
from typing import Any, cast

from llvmlite import ir  # pyright: ignore[reportMissingTypeStubs]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# numba and llvmlite have no types of their own: everything that touches them here is Any.
_intrinsic = cast("Any", intrinsic)
_types = cast("Any", types)
_ir = cast("Any", ir)
_WORD = _ir.IntType(64)
_WORD_BYTES = 8
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


@_intrinsic
def atomic_add(typing_context: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at `address`; returns what was there before. Ordered with all other atomic accesses."""
    del typing_context, address, amount

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], "seq_cst")

    return _types.int64(_types.int64, _types.int64), generate


@_intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    """The int64 at `address`, and everything that its writer wrote before it."""
    del typing_context, address

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.load_atomic(_word(builder, arguments[0]), "seq_cst", _WORD_BYTES, typ=_WORD)

    return _types.int64(_types.int64), generate


@_intrinsic
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Set the int64 at `address`, visible after everything written before."""
    del typing_context, address, value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "seq_cst", _WORD_BYTES)
        return context.get_dummy_value()

    return _types.void(_types.int64, _types.int64), generate


@_intrinsic
def atomic_replace(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Set the int64 at `address` if it is `expected`; returns what was there before."""
    del typing_context, address, expected, value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        word = _word(builder, arguments[0])
        return builder.extract_value(builder.cmpxchg(word, arguments[1], arguments[2], "seq_cst", "seq_cst"), 0)

    return _types.int64(_types.int64, _types.int64, _types.int64), generate


@_intrinsic
def load_word(typing_context: Any, address: Any) -> Any:
    """The int64 at `address`."""
    del typing_context, address

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.load(_word(builder, arguments[0]))

    return _types.int64(_types.int64), generate


@_intrinsic
def store_word(typing_context: Any, address: Any, value: Any) -> Any:
    """Set the int64 at `address`."""
    del typing_context, address, value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        builder.store(arguments[1], _word(builder, arguments[0]))
        return context.get_dummy_value()

    return _types.void(_types.int64, _types.int64), generate


@_intrinsic
def relax(typing_context: Any) -> Any:
    """A moment of a waiting loop: tells the core that this thread spins. Nothing where the core has no such hint."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature, arguments
        if _IS_X86:
            pause = cast("Any", cgutils).get_or_insert_function(
                builder.module, _ir.FunctionType(_ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(pause, [])
        return context.get_dummy_value()

    return _types.void(), generate


# Of the C library, found in the process by name. A semaphore is 32 bytes; its functions return 0 when all is well.
_int_from_address = _types.int32(_types.int64)
semaphore_wait = _types.ExternalFunction("sem_wait", _int_from_address)
semaphore_try = _types.ExternalFunction("sem_trywait", _int_from_address)
semaphore_post = _types.ExternalFunction("sem_post", _int_from_address)
yield_core = _types.ExternalFunction("sched_yield", _types.int32())
