"""The vector builder."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.model.kernels.cpu import vectors
from shared.model.kernels.cpu.vectors import FLOAT32, INT64, Emitter, MicroKernel, Value, micro_kernel, select_kernel
from tests.support.kernel_products import njit


def _apply(name: str, emit: Callable[[Emitter, Value, Value], None], *, portable: bool = False) -> Callable[..., None]:
    """A compiled loop: the body gets the addresses of eight elements in and out (4 bytes an element and step)."""

    def body(emitter: Emitter, source: Value, target: Value, count: Value) -> None:
        if portable:
            emitter = Emitter(emitter.builder, portable=True)
        with emitter.loop(count) as index:
            emit(emitter, emitter.at(source, emitter.times(index, 32)), emitter.at(target, emitter.times(index, 32)))

    kernel = micro_kernel(f"test_{name}_{portable}", (INT64, INT64, INT64), body)

    def run(source: int, target: int, count: int) -> None:
        kernel((source, target, count))

    return njit(run)


def _run(compiled: Callable[..., None], source: NDArray[Any]) -> NDArray[np.uint32]:
    """The 4-byte elements that came out."""
    target = np.zeros(source.shape, np.uint32)
    compiled(source.ctypes.data, target.ctypes.data, source.size // 8)
    return target


def _all_halves() -> NDArray[np.float16]:
    return np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)


def _floats_near_halves() -> NDArray[np.float32]:
    """Every finite float16, the middles between neighbours and their neighbours, beyond the range, and not a number."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    special = np.array([65519.0, 65520.0, 65536.0, 1e38, np.inf, np.nan, 1e-8, 2.0**-25], np.float32)
    positive = np.concatenate([halves, middles, *near, special]).astype(np.float32)
    both = np.concatenate([positive, -positive])
    return both[: both.size // 8 * 8]


@pytest.mark.parametrize("portable", [False, True])
def test_float16_is_read_exactly(portable: bool) -> None:
    """All finite float16, in hardware and by integer operations."""

    def emit(emitter: Emitter, source: Value, target: Value) -> None:
        # Sixteen bytes in for 32 out: the source is laid out with a gap.
        emitter.store(emitter.load_halves(source), target)

    halves = _all_halves()
    halves = halves[np.isfinite(halves)]
    gapped = np.zeros((halves.size // 8, 16), np.float16)
    gapped[:, :8] = halves.reshape(-1, 8)
    actual = _run(_apply("load_halves", emit, portable=portable), gapped.view(np.uint32).reshape(-1))
    np.testing.assert_array_equal(halves.astype(np.float32).view(np.uint32), actual)


@pytest.mark.parametrize("portable", [False, True])
def test_float16_is_written_to_the_nearest(portable: bool) -> None:
    """As numpy does: halves to even, subnormal ones, infinity beyond the range, what is not a number stays so."""

    def emit(emitter: Emitter, source: Value, target: Value) -> None:
        emitter.store_halves(emitter.load(vectors.f32x8, source), target)

    numbers = _floats_near_halves()
    written = _run(_apply("store_halves", emit, portable=portable), numbers).view(np.float16).reshape(-1, 16)[:, :8]
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16)
    np.testing.assert_array_equal(expected, written.reshape(-1))


def test_bfloat16_is_written_to_the_nearest_and_read_exactly() -> None:
    """Halves to even; what is not a number stays so; a number read back is the number written."""

    def store(emitter: Emitter, source: Value, target: Value) -> None:
        emitter.store_bfloats(emitter.load(vectors.f32x8, source), target)

    def load(emitter: Emitter, source: Value, target: Value) -> None:
        emitter.store(emitter.load_bfloats(source), target)

    random = np.random.default_rng(5).integers(0, 2**32, 8000, dtype=np.uint32)
    middles = (random & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    bits = np.concatenate([random, middles, np.array([0, 0x80000000, 0x7F800000, 0x7F7FFFFF] * 2, np.uint32)])
    numbers = bits[np.isfinite(bits.view(np.float32)) | np.isinf(bits.view(np.float32))]
    numbers = numbers[: numbers.size // 8 * 8]
    kept, rest = numbers >> 16, numbers & 0xFFFF
    expected = kept + ((rest > 0x8000) | ((rest == 0x8000) & (kept & 1 == 1)))
    raw = _run(_apply("store_bfloats", store), numbers)
    written = raw.view(np.uint16).reshape(-1, 16)[:, :8].reshape(-1)
    np.testing.assert_array_equal(expected.astype(np.uint16), written)
    np.testing.assert_array_equal(written.astype(np.uint32) << 16, _run(_apply("load_bfloats", load), raw))
    not_numbers = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001] * 2, np.uint32)
    back = _run(_apply("load_bfloats_again", load), _run(_apply("store_bfloats_again", store), not_numbers))
    assert np.isnan(back.view(np.float32)).all()


def test_exp_is_close_and_bounded() -> None:
    """Within two units in the last place of float64's; held at its ends; what is not a number stays so."""

    def emit(emitter: Emitter, source: Value, target: Value) -> None:
        emitter.store(emitter.exp(emitter.load(vectors.f32x8, source)), target)

    compiled = _apply("exp", emit)
    x = np.linspace(-86.9, 87.9, 80000).astype(np.float32)
    actual = _run(compiled, x).view(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(actual - expected) / expected).max() < 2 * 2.0**-23
    ends = np.array([-np.inf, -1e30, -87.0, 88.0, 1e30, np.inf, 0.0, np.nan], np.float32)
    actual = _run(compiled, ends).view(np.float32)
    assert actual[0] == actual[1] == actual[2] < 2e-38
    assert actual[3] == actual[4] == actual[5] > 1e38
    assert 1.0 == actual[6]
    assert np.isnan(actual[7])


def test_lanes_are_added_by_a_fixed_tree() -> None:
    """((0+4)+(2+6))+((1+5)+(3+7)) in float32, and the largest of the eight."""

    def emit(emitter: Emitter, source: Value, target: Value) -> None:
        vector = emitter.load(vectors.f32x8, source)
        emitter.store(emitter.sum_of_lanes(vector), target)
        emitter.store(emitter.largest_lane(vector), target, 4)

    x = np.random.default_rng(6).standard_normal((50, 8)).astype(np.float32) * np.float32(1e4)
    fours = x[:, :4] + x[:, 4:]
    twos = fours[:, :2] + fours[:, 2:]
    actual = _run(_apply("lanes", emit), x.reshape(-1)).view(np.float32).reshape(50, 8)
    np.testing.assert_array_equal(twos[:, 0] + twos[:, 1], actual[:, 0])
    np.testing.assert_array_equal(x.max(axis=1), actual[:, 1])


@pytest.mark.parametrize("portable", [False, True])
def test_integer_products_add_neighbours(portable: bool) -> None:
    """Both products at the ends of their ranges, by the x86 operation and by its twin."""

    def words(emitter: Emitter, source: Value, target: Value) -> None:
        pairs = emitter.load(vectors.i16x16, source)
        emitter.store(emitter.pair_products(pairs, pairs), target)

    values = np.random.default_rng(8).integers(-32767, 32768, (40, 16)).astype(np.int16)
    values[0], values[1] = 32767, -32767
    squares = values.astype(np.int64) ** 2
    actual = _run(_apply("words", words, portable=portable), values.reshape(-1).view(np.uint32))
    np.testing.assert_array_equal((squares[:, 0::2] + squares[:, 1::2]).reshape(-1), actual.view(np.int32))

    def small(emitter: Emitter, source: Value, target: Value) -> None:
        # Sixteen bytes of weights twice, against the 32 bytes as they are.
        signed = emitter.load(vectors.i8x32, source)
        codes = emitter.builder.and_(signed, vectors.constant(vectors.i8x32, 15))
        emitter.store(emitter.byte_pair_products(codes, signed), target)

    signed = np.random.default_rng(9).integers(-127, 128, (40, 32)).astype(np.int8)
    signed[0], signed[1] = 127, -113  # -113 & 15 is 15
    products = (signed.astype(np.int64) & 15) * signed.astype(np.int64)
    expected = products[:, 0::2] + products[:, 1::2]
    actual = _run(_apply("small", small, portable=portable), signed.reshape(-1).view(np.uint32))
    np.testing.assert_array_equal(expected.reshape(-1), actual.view(np.int16))


def test_pinned_values_stay_what_they_are() -> None:
    """One and several of them."""

    def emit(emitter: Emitter, source: Value, target: Value) -> None:
        (one,) = emitter.pin([emitter.load(vectors.f32x8, source)])
        two, three = emitter.pin([one, emitter.builder.fadd(one, one)])
        emitter.store(emitter.builder.fsub(three, two), target)

    x = np.random.default_rng(4).standard_normal(64).astype(np.float32)
    np.testing.assert_array_equal(x, _run(_apply("pin", emit), x).view(np.float32))


def test_arguments_are_converted_and_counted() -> None:
    """Any integer becomes int64, any number float32; a wrong number of arguments does not compile."""

    def emit(emitter: Emitter, target: Value, number: Value) -> None:
        emitter.store(number, target)

    kernel = micro_kernel("test_arguments", (INT64, FLOAT32), emit)

    def run(target: int, number: float) -> None:
        kernel((target, number))

    out = np.zeros(1, np.float32)
    compiled: Any = njit(run)
    compiled(np.uint64(out.ctypes.data), 0.1)
    assert [np.float32(0.1)] == out.tolist()

    def wrong(target: int) -> None:
        kernel((target,))

    with pytest.raises(Exception, match="takes 2 arguments, not 1"):
        njit(wrong)(out.ctypes.data)


def test_a_kernel_is_chosen_by_number() -> None:
    """At run time among all, none for a number without one; a constant without one does not compile."""

    def writer(number: float) -> Callable[[Emitter, Value], None]:
        return lambda emitter, target: emitter.store(vectors.constant(vectors.f32, number), target)

    kernel = select_kernel({each: MicroKernel(f"test_write_{each}", (INT64,), writer(each)) for each in (3, 5)})

    def run(number: int, target: int) -> None:
        kernel(number, (target,))

    compiled: Any = njit(run)
    out = np.zeros(1, np.float32)
    seen: list[float] = []
    for number in (3, 5, 4):
        out[0] = -1
        compiled(number, out.ctypes.data)
        seen.append(out.item())
    assert [3.0, 5.0, -1.0] == seen

    def wrong(target: int) -> None:
        kernel(4, (target,))

    with pytest.raises(Exception, match="no kernel 4"):
        njit(wrong)(out.ctypes.data)


def test_numbas_settings_go_before_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features named for numba decide; none named, the host's."""
    monkeypatch.setattr(vectors.config, "CPU_FEATURES", "")
    assert not vectors.has_avx2()
    monkeypatch.setattr(vectors.config, "CPU_FEATURES", "+sse2,+avx2,+fma,+f16c")
    assert vectors.has_avx2()
    monkeypatch.setattr(vectors.config, "CPU_FEATURES", "+avx2,+fma")
    assert not vectors.has_avx2()
