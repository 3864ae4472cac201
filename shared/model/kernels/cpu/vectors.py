"""Explicit vector code for numba: a small builder over LLVM, and micro-kernels made of it.

Nothing here sets a fast-math flag, and none may: LLVM then keeps each operation and its order, so the same inputs give
the same bits in every kernel, on every thread, for any number of rows. `fma` is fused by definition, in hardware or
(slowly, with the same bits) in the C library. The only x86 operations are two integer products; each has a portable
twin with the same result, taken where the code is compiled for a CPU without AVX2 (`has_avx2`).
"""

import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import numba
from llvmlite import binding as _binding  # pyright: ignore[reportMissingTypeStubs]
from llvmlite import ir as _ir  # pyright: ignore[reportMissingTypeStubs]
from numba.core import cgutils as _cgutils
from numba.core import config as _config
from numba.extending import intrinsic as _intrinsic

# None of these packages carries usable types.
ir = cast("Any", _ir)
binding = cast("Any", _binding)
cgutils = cast("Any", _cgutils)
config = cast("Any", _config)
intrinsic = cast("Any", _intrinsic)

type_of = cast("Any", numba.types)
INT64 = type_of.int64
"""Type of an argument of a micro-kernel: an address, a count or a distance in bytes."""
FLOAT32 = type_of.float32
"""Type of an argument of a micro-kernel: a single number."""

f32 = ir.FloatType()
f16 = ir.HalfType()
i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
f32x8 = ir.VectorType(f32, 8)
f16x8 = ir.VectorType(f16, 8)
i8x8, i8x16, i8x32 = (ir.VectorType(i8, lanes) for lanes in (8, 16, 32))
i16x8, i16x16 = (ir.VectorType(i16, lanes) for lanes in (8, 16))
i32x8 = ir.VectorType(i32, 8)

Value = Any
"""A value of LLVM: the result of an operation, an argument or a constant."""


def has_avx2() -> bool:
    """Whether numba compiles for a CPU with AVX2, FMA and F16C.

    numba's own settings NUMBA_CPU_NAME and NUMBA_CPU_FEATURES go before what the host has, so a process started with
    `generic` and no features compiles the portable path.
    """
    if config.CPU_FEATURES is not None:
        features = set(str(config.CPU_FEATURES).split(","))
    else:
        features = set(str(binding.get_host_cpu_features().flatten()).split(","))
    return {"+avx2", "+fma", "+f16c"} <= features


def constant(kind: Any, value: float | Sequence[float]) -> Value:
    """A number of type `kind`; for a vector type in each lane, or lane by lane from a sequence."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind

    def rounded(number: float) -> float | int:
        return struct.unpack("f", struct.pack("f", number))[0] if element == f32 else int(number)

    if not isinstance(kind, ir.VectorType):
        return ir.Constant(kind, rounded(cast("float", value)))
    lanes = list(value) if isinstance(value, Sequence) else [value] * kind.count
    return ir.Constant(kind, [rounded(lane) for lane in lanes])


class Emitter:
    """Writes LLVM operations at the end of a function.

    Addresses are i64 and plain Python integers where known; loads and stores are unaligned. `portable` leaves out all
    that is x86's; by default where the code is compiled for a CPU without AVX2.
    """

    def __init__(self, builder: Any, *, portable: bool | None = None) -> None:
        self.builder = builder
        self._portable = not has_avx2() if portable is None else portable

    # ---- addresses and memory
    def at(self, address: Value, *offsets: Value | int) -> Value:
        """`address` and the sum of `offsets`, in bytes."""
        for offset in offsets:
            if isinstance(offset, int):
                if offset:
                    address = self.builder.add(address, constant(i64, offset))
            else:
                address = self.builder.add(address, offset)
        return address

    def times(self, count: Value, distance: Value | int) -> Value:
        """`count` x `distance`, as i64."""
        return self.builder.mul(count, constant(i64, distance) if isinstance(distance, int) else distance)

    def load(self, kind: Any, address: Value, offset: int = 0) -> Value:
        """What lies at address + offset."""
        pointer = self.builder.inttoptr(self.at(address, offset), kind.as_pointer())
        return self.builder.load(pointer, align=1)

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        """Put `value` to address + offset."""
        pointer = self.builder.inttoptr(self.at(address, offset), value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def prefetch(self, address: Value, offset: int = 0) -> None:
        """Ask for the cache line at address + offset; never faults."""
        kind = ir.FunctionType(ir.VoidType(), [i8.as_pointer(), i32, i32, i32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        pointer = self.builder.inttoptr(self.at(address, offset), i8.as_pointer())
        self.builder.call(function, [pointer, constant(i32, 0), constant(i32, 3), constant(i32, 1)])

    def buffer(self, num_bytes: int) -> Value:
        """Address of scratch on the stack, aligned to 64 bytes, with any contents."""
        # Not numba's alloca_once: it clears the memory, one store for each byte as far as LLVM's passes are concerned.
        with self.builder.goto_entry_block():
            pointer = self.builder.alloca(ir.ArrayType(i8, num_bytes))
            pointer.align = 64
        return self.builder.ptrtoint(pointer, i64)

    # ---- variables and control
    def variable(self, kind: Any, initial: Value) -> Any:
        """A variable that LLVM keeps in a register; `get` and `set` it."""
        pointer = cgutils.alloca_once(self.builder, kind)
        self.builder.store(initial, pointer)
        return pointer

    def get(self, variable: Any) -> Value:
        """What was last set."""
        return self.builder.load(variable)

    def set(self, variable: Any, value: Value) -> None:
        """Set a variable."""
        self.builder.store(value, variable)

    @contextmanager
    def loop(self, count: Value | int) -> Generator[Value]:
        """The block is the body of a loop over 0, 1 ... count - 1, given as i64."""
        limit = constant(i64, count) if isinstance(count, int) else count
        with cgutils.for_range(self.builder, limit, intp=i64) as loop:
            yield loop.index

    def when(self, condition: Value) -> AbstractContextManager[Any]:
        """The block runs where `condition` (i1) holds."""
        return self.builder.if_then(condition)

    def either(self, condition: Value) -> AbstractContextManager[tuple[Any, Any]]:
        """Two blocks, for where `condition` holds and where not."""
        return self.builder.if_else(condition)

    def pin(self, values: Sequence[Value]) -> list[Value]:
        """The same values, computed before this point, with no load moved across it; emits nothing.

        LLVM would otherwise turn a long chain of integer sums into a tree and load everything first: with more vectors
        alive than there are registers, half of the time goes to spills. At most 8 values of one type.
        """
        if self._portable:
            return list(values)
        constraints = ["=x"] * len(values) + [str(index) for index in range(len(values))] + ["~{memory}"]
        kinds = [value.type for value in values]
        result = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        pinned = self.builder.asm(ir.FunctionType(result, kinds), "", ",".join(constraints), values, True)
        if len(kinds) == 1:
            return [pinned]
        return [self.builder.extract_value(pinned, index) for index in range(len(kinds))]

    # ---- lanes
    def shuffle(self, vector: Value, lanes: Sequence[int]) -> Value:
        """The vector of these lanes, in this order."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.builder.shuffle_vector(vector, undefined, constant(ir.VectorType(i32, len(lanes)), lanes))

    def broadcast(self, scalar: Value, lanes: int = 8) -> Value:
        """`scalar` in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        one = self.builder.insert_element(undefined, scalar, constant(i32, 0))
        return self.shuffle(one, [0] * lanes)

    def load_broadcast(self, kind: Any, address: Value, offset: int = 0, lanes: int = 8) -> Value:
        """The scalar at address + offset in every lane."""
        return self.broadcast(self.load(kind, address, offset), lanes)

    # ---- float32
    def _call(self, name: str, result: Any, *arguments: Value) -> Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a x b + c in float32x8 with one rounding."""
        return self._call("llvm.fma.v8f32", f32x8, a, b, c)

    def absolute(self, a: Value) -> Value:
        """|a| of float32x8."""
        return self._call("llvm.fabs.v8f32", f32x8, a)

    def nearest(self, a: Value) -> Value:
        """float32x8 to the nearest whole number, halves to even."""
        return self._call("llvm.rint.v8f32", f32x8, a)

    def root(self, a: Value) -> Value:
        """Square root of one float32, correctly rounded."""
        return self._call("llvm.sqrt.f32", f32, a)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger, lane by lane; b where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller, lane by lane; b where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def sum_of_lanes(self, vector: Value) -> Value:
        """The eight lanes of a float32x8 added by a fixed tree: (0+4)+(2+6) and so on."""
        for distance in (4, 2, 1):
            turned = self.shuffle(vector, [(lane + distance) % 8 for lane in range(8)])
            vector = self.builder.fadd(vector, turned)
        return self.builder.extract_element(vector, constant(i32, 0))

    def largest_lane(self, vector: Value) -> Value:
        """The largest of eight float32 lanes."""
        for distance in (4, 2, 1):
            turned = self.shuffle(vector, [(lane + distance) % 8 for lane in range(8)])
            vector = self.larger(vector, turned)
        return self.builder.extract_element(vector, constant(i32, 0))

    def exp(self, x: Value) -> Value:
        """e^x of float32x8 to about two units in the last place, x held within -87 ... 88.

        e^x = 2^n e^r with n = round(x / ln 2), ln 2 split into two parts, and the minimax polynomial of Cephes for e^r.
        Not a number stays one: the upper bound is applied last and lets it through.
        """
        builder = self.builder
        low, high = constant(f32x8, -87.0), constant(f32x8, 88.0)
        clipped = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        clipped = builder.select(builder.fcmp_ordered(">", clipped, high), high, clipped)
        n = self.nearest(builder.fmul(clipped, constant(f32x8, 1.44269504088896341)))
        r = self.fma(n, constant(f32x8, -0.693359375), clipped)
        r = self.fma(n, constant(f32x8, 2.12194440e-4), r)
        p = constant(f32x8, 1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, constant(f32x8, c))
        p = self.fma(p, builder.fmul(r, r), builder.fadd(r, constant(f32x8, 1.0)))
        # The conversion of what is no number is undefined in LLVM, hence the zero; p carries it on.
        whole = builder.fptosi(self.number_or_zero(n), i32x8)
        power = builder.shl(builder.add(whole, constant(i32x8, 127)), constant(i32x8, 23))
        return builder.fmul(p, builder.bitcast(power, f32x8))

    def number_or_zero(self, a: Value) -> Value:
        """float32x8 with 0 where a lane is not a number."""
        return self.builder.select(self.builder.fcmp_ordered("ord", a, a), a, constant(f32x8, 0.0))

    # ---- conversions
    def load_halves(self, address: Value, offset: int = 0) -> Value:
        """Eight float16 as float32, exact; finite ones only."""
        if not self._portable:
            return self.builder.fpext(self.load(f16x8, address, offset), f32x8)
        # Exponent and fraction move into place, 2^112 corrects the bias (and makes subnormal ones normal).
        builder = self.builder
        bits = builder.zext(self.load(i16x8, address, offset), i32x8)
        sign = builder.shl(builder.and_(bits, constant(i32x8, 0x8000)), constant(i32x8, 16))
        magnitude = builder.shl(builder.and_(bits, constant(i32x8, 0x7FFF)), constant(i32x8, 13))
        scaled = builder.fmul(builder.bitcast(magnitude, f32x8), constant(f32x8, 2.0**112))
        return builder.bitcast(builder.or_(builder.bitcast(scaled, i32x8), sign), f32x8)

    def store_halves(self, value: Value, address: Value, offset: int = 0) -> None:
        """float32x8 as eight float16, to the nearest, halves to even; beyond the range infinity."""
        builder = self.builder
        if not self._portable:
            self.store(builder.fptrunc(value, f16x8), address, offset)
            return
        bits = builder.bitcast(value, i32x8)
        sign = builder.and_(builder.lshr(bits, constant(i32x8, 16)), constant(i32x8, 0x8000))
        magnitude = builder.and_(bits, constant(i32x8, 0x7FFFFFFF))
        # Normal results: move the bias, round by adding half a unit less one, and one where the kept part is odd.
        odd = builder.and_(builder.lshr(magnitude, constant(i32x8, 13)), constant(i32x8, 1))
        rounded = builder.add(builder.add(magnitude, odd), constant(i32x8, 0xFFF - (112 << 23)))
        half = builder.lshr(rounded, constant(i32x8, 13))
        half = self._smaller_integer(half, constant(i32x8, 0x7C00))
        # Below 2^-14: adding 0.5 lets the float unit round at 2^-24, the unit of subnormal halves.
        tiny = builder.fadd(builder.bitcast(magnitude, f32x8), constant(f32x8, 0.5))
        tiny = builder.sub(builder.bitcast(tiny, i32x8), constant(i32x8, 0x3F000000))
        half = builder.select(builder.icmp_signed("<", magnitude, constant(i32x8, 0x38800000)), tiny, half)
        is_number = builder.icmp_signed("<=", magnitude, constant(i32x8, 0x7F800000))
        half = builder.select(is_number, half, constant(i32x8, 0x7E00))
        self.store(builder.trunc(builder.or_(half, sign), i16x8), address, offset)

    def load_bfloats(self, address: Value, offset: int = 0) -> Value:
        """Eight bfloat16 as float32, exact."""
        bits = self.builder.zext(self.load(i16x8, address, offset), i32x8)
        return self.builder.bitcast(self.builder.shl(bits, constant(i32x8, 16)), f32x8)

    def store_bfloats(self, value: Value, address: Value, offset: int = 0) -> None:
        """float32x8 as eight bfloat16, to the nearest, halves to even."""
        builder = self.builder
        bits = builder.bitcast(value, i32x8)
        odd = builder.and_(builder.lshr(bits, constant(i32x8, 16)), constant(i32x8, 1))
        rounded = builder.add(bits, builder.add(odd, constant(i32x8, 0x7FFF)))
        # Rounding up could carry a "not a number" into a number: such a one keeps its top bits and a quiet bit.
        quiet = builder.or_(bits, constant(i32x8, 0x400000))
        rounded = builder.select(builder.fcmp_ordered("ord", value, value), rounded, quiet)
        self.store(builder.trunc(builder.lshr(rounded, constant(i32x8, 16)), i16x8), address, offset)

    def _smaller_integer(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    # ---- integer products
    def pair_products(self, a: Value, b: Value) -> Value:
        """int16x16 by int16x16: products of neighbours added, int32x8. Not for -32768 in both of both pairs."""
        if not self._portable:
            return self._call("llvm.x86.avx2.pmadd.wd", i32x8, a, b)
        return self._added_pairs(a, b, "sext", "sext", i32x8)

    def byte_pair_products(self, a: Value, b: Value) -> Value:
        """uint8x32 by int8x32: products of neighbours added, int16x16. The sums must fit, as those of 4-bit ones do."""
        if not self._portable:
            return self._call("llvm.x86.avx2.pmadd.ub.sw", i16x16, a, b)
        return self._added_pairs(a, b, "zext", "sext", i16x16)

    def _added_pairs(self, a: Value, b: Value, widen_a: str, widen_b: str, result: Any) -> Value:
        builder = self.builder
        products = [
            builder.mul(
                getattr(builder, widen_a)(self.shuffle(a, range(parity, 2 * result.count, 2)), result),
                getattr(builder, widen_b)(self.shuffle(b, range(parity, 2 * result.count, 2)), result),
            )
            for parity in (0, 1)
        ]
        return builder.add(*products)


class MicroKernel:
    """A function of machine code without a result: `emit(emitter, *arguments)` writes its body.

    `parameters` are INT64 and FLOAT32. The code exists once in a compiled module however often it is called (linkonce)
    and is not inlined: register allocation is then that of the kernel alone, and compilation stays short. `name` must
    be unique.
    """

    def __init__(self, name: str, parameters: Sequence[Any], emit: Callable[..., None]) -> None:
        self._name = f"firsttoken_{name}"
        self.parameters = tuple(parameters)
        self._emit = emit

    def call(self, builder: Any, arguments: Sequence[Value]) -> None:
        """Write a call, and the function itself where the module lacks it."""
        kinds = [{INT64: i64, FLOAT32: f32}[parameter] for parameter in self.parameters]
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), self._name)
        if not function.blocks:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            function.attributes.add("nounwind")
            body = ir.IRBuilder(function.append_basic_block("entry"))
            self._emit(Emitter(body), *function.args)
            body.ret_void()
        builder.call(function, arguments)


def micro_kernel(name: str, parameters: Sequence[Any], emit: Callable[..., None]) -> Any:
    """A MicroKernel for use in numba functions: `kernel((argument, ...))`, one tuple, converted to the parameters."""
    code = MicroKernel(name, parameters, emit)

    @intrinsic
    def kernel(typing_context: Any, arguments: Any) -> Any:
        del typing_context
        _check_count(name, arguments, code.parameters)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            del signature
            code.call(builder, _converted(context, builder, values[0], arguments, code.parameters))
            return context.get_dummy_value()

        return type_of.void(arguments), generate

    return kernel


def select_kernel(codes: Mapping[int, MicroKernel]) -> Any:
    """One of several kernels with the same parameters for use in numba functions: `kernel(number, (argument, ...))`.

    Where the number is a constant of the calling function only that kernel is compiled; else all are, and the call
    chooses. A number of no kernel does nothing.
    """
    parameters = next(iter(codes.values())).parameters

    @intrinsic(prefer_literal=True)
    def kernel(typing_context: Any, number: Any, arguments: Any) -> Any:
        del typing_context
        _check_count("a selected kernel", arguments, parameters)
        chosen = number.literal_value if isinstance(number, type_of.IntegerLiteral) else None
        if chosen is not None and chosen not in codes:
            raise TypeError(f"there is no kernel {chosen}")

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            converted = _converted(context, builder, values[1], signature.args[1], parameters)
            if chosen is not None:
                codes[chosen].call(builder, converted)
                return context.get_dummy_value()
            end = builder.append_basic_block("chosen")
            choice = builder.switch(context.cast(builder, values[0], signature.args[0], INT64), end)
            for each, code in codes.items():
                block = builder.append_basic_block("kernel")
                choice.add_case(constant(i64, each), block)
                builder.position_at_end(block)
                code.call(builder, converted)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return type_of.void(number, arguments), generate

    return kernel


def _check_count(name: str, arguments: Any, parameters: Sequence[Any]) -> None:
    if len(arguments) != len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} arguments, not {len(arguments)}")


def _converted(context: Any, builder: Any, values: Value, kinds: Any, parameters: Sequence[Any]) -> list[Value]:
    """The elements of a numba tuple as the types of the parameters."""
    return [
        context.cast(builder, builder.extract_value(values, index), kind, parameter)
        for index, (kind, parameter) in enumerate(zip(kinds, parameters, strict=True))
    ]
