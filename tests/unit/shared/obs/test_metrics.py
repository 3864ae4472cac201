from shared.domain.refusals import RefusedKind
from shared.obs.metrics import Metrics


def lines_of(metrics: Metrics) -> list[str]:
    """The samples, without comments and buckets."""
    text = metrics.render().decode()
    return [line for line in text.splitlines() if not line.startswith("#") and "_bucket{" not in line]


def test_scheduler_series_have_exactly_their_names_and_labels() -> None:
    """A gauge and a counter of one stem stand side by side; every outcome is there from the start."""
    metrics = Metrics("scheduler", "scheduler-7000")
    metrics.requests(lambda: {"queued": 0, "decoding": 2})
    metrics.requests_total.add("finished")

    assert sorted(lines_of(metrics)) == [
        "firsttoken_cancel_release_seconds_count 0.0",
        "firsttoken_cancel_release_seconds_sum 0.0",
        'firsttoken_requests_total{outcome="cancelled"} 0.0',
        'firsttoken_requests_total{outcome="failed"} 0.0',
        'firsttoken_requests_total{outcome="finished"} 1.0',
        'firsttoken_requests{state="decoding"} 2.0',
        'firsttoken_requests{state="queued"} 0.0',
    ]


def test_worker_series_have_exactly_their_names_and_labels() -> None:
    """Blocks by role, worker and state; tokens and steps by role."""
    metrics = Metrics("decode", "decode-0")
    metrics.kv_blocks(lambda: {"free": 3, "active": 1})
    metrics.outbox_tokens(lambda: 7)
    metrics.tasks(lambda: 12)
    metrics.open_calls(lambda: 2)
    metrics.tokens_computed.add(5)
    metrics.tokens_computed.add(6)
    metrics.step_sequences.record(3)
    metrics.refused(RefusedKind.STALE_EPOCH)
    metrics.prefix_looked_up(num_hit=32, num_missed=9, num_evicted=1)
    metrics.prefix_looked_up(num_hit=0, num_missed=7, num_evicted=2)

    assert sorted(lines_of(metrics)) == [
        'firsttoken_kv_blocks{role="decode",state="active",worker="decode-0"} 1.0',
        'firsttoken_kv_blocks{role="decode",state="free",worker="decode-0"} 3.0',
        "firsttoken_open_calls 2.0",
        'firsttoken_outbox_tokens{worker="decode-0"} 7.0',
        'firsttoken_prefix_cache_evictions_total{role="decode"} 3.0',
        'firsttoken_prefix_cache_tokens_total{result="hit"} 32.0',
        'firsttoken_prefix_cache_tokens_total{result="miss"} 16.0',
        'firsttoken_refused_total{kind="stale_epoch"} 1.0',
        'firsttoken_step_sequences_count{role="decode"} 1.0',
        'firsttoken_step_sequences_sum{role="decode"} 3.0',
        "firsttoken_tasks 12.0",
        'firsttoken_tokens_computed_total{role="decode"} 11.0',
    ]


def test_transfers_count_from_zero() -> None:
    """Bytes by transport, fallbacks by reason, and the exposed time, before the first of each."""
    metrics = Metrics("prefill", "prefill-0")
    metrics.kv_transfers(transports=("shm",), fallback_reasons=("proof",))
    before = sorted(lines_of(metrics))
    metrics.kv_transfer_bytes.add("shm", 5)
    metrics.kv_transfer_exposed_seconds.record(0.25)

    assert before == [
        'firsttoken_kv_transfer_bytes_total{transport="shm"} 0.0',
        "firsttoken_kv_transfer_exposed_seconds_count 0.0",
        "firsttoken_kv_transfer_exposed_seconds_sum 0.0",
        'firsttoken_kv_transport_fallbacks_total{reason="proof"} 0.0',
    ]
    assert 'firsttoken_kv_transfer_bytes_total{transport="shm"} 5.0' in lines_of(metrics)
    assert "firsttoken_kv_transfer_exposed_seconds_sum 0.25" in lines_of(metrics)


def test_types_are_declared() -> None:
    """Prometheus knows a counter from a gauge from a histogram."""
    metrics = Metrics("prefill", "prefill-0")
    metrics.kv_blocks(dict)
    metrics.active_streams(lambda: 0)
    metrics.requests(lambda: {"queued": 0})
    metrics.cancel_release_seconds.record(0.02)

    types = {line for line in metrics.render().decode().splitlines() if line.startswith("# TYPE")}
    assert types == {
        "# TYPE firsttoken_active_streams gauge",
        "# TYPE firsttoken_cancel_release_seconds histogram",
        "# TYPE firsttoken_prefix_cache_evictions_total counter",
        "# TYPE firsttoken_prefix_cache_tokens_total counter",
        "# TYPE firsttoken_requests gauge",
        "# TYPE firsttoken_requests_total counter",
        "# TYPE firsttoken_step_sequences histogram",
        "# TYPE firsttoken_tokens_computed_total counter",
    }


def test_a_histogram_is_there_before_its_first_value() -> None:
    """With the same buckets as after it, and once: zeros for a rate to start from."""

    def series(metrics: Metrics) -> list[str]:
        lines = metrics.render().decode().splitlines()
        return [line.rsplit(" ", 1)[0] for line in lines if line.startswith("firsttoken_step_sequences")]

    metrics = Metrics("prefill", "prefill-0")
    metrics.kv_blocks(dict)
    before = series(metrics)
    metrics.step_sequences.record(3)

    assert series(metrics) == before
    assert len(before) == len(set(before))


def test_release_buckets_tell_a_step_from_a_chunk() -> None:
    """A release of 42 ms lies between the bounds 40 and 50 ms."""
    metrics = Metrics("scheduler", "scheduler")
    metrics.cancel_release_seconds.record(0.042)

    text = metrics.render().decode()
    assert 'firsttoken_cancel_release_seconds_bucket{le="0.04"} 0.0' in text
    assert 'firsttoken_cancel_release_seconds_bucket{le="0.05"} 1.0' in text


def test_two_processes_in_one_test_do_not_share() -> None:
    """Nothing is registered globally."""
    one, other = Metrics("decode", "decode-0"), Metrics("decode", "decode-1")
    one.tokens_computed.add(1)

    assert [] == lines_of(other)
    one.close()
    other.close()
