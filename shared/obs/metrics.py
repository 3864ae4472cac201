"""Every metric name of the system, its labels and buckets; nothing else names a metric.

OpenTelemetry instruments, read as Prometheus text format 0.0.4. Scope labels and target info are off, so that the
series carry exactly the labels named here.
"""

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.metrics import Counter as CounterInstrument
from opentelemetry.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from shared.domain.errors import ErrorCode
from shared.domain.refusals import RefusedKind
from shared.domain.request import TERMINAL_STATES

KV_BLOCKS = "firsttoken_kv_blocks"
REQUESTS = "firsttoken_requests"
REQUESTS_TOTAL = "firsttoken_requests_total"
TOKENS_COMPUTED_TOTAL = "firsttoken_tokens_computed_total"
CANCEL_RELEASE_SECONDS = "firsttoken_cancel_release_seconds"
STEP_SEQUENCES = "firsttoken_step_sequences"
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # OpenTelemetry's own name
REFUSED_TOTAL = "firsttoken_refused_total"
ACTIVE_STREAMS = "firsttoken_active_streams"
OUTBOX_TOKENS = "firsttoken_outbox_tokens"
TASKS = "firsttoken_tasks"
OPEN_CALLS = "firsttoken_open_calls"
PREFIX_CACHE_TOKENS_TOTAL = "firsttoken_prefix_cache_tokens_total"
PREFIX_CACHE_EVICTIONS_TOTAL = "firsttoken_prefix_cache_evictions_total"
REQUEUES_TOTAL = "firsttoken_requeues_total"
PREEMPTIONS_TOTAL = "firsttoken_preemptions_total"
REPLAYED_TOKENS_TOTAL = "firsttoken_replayed_tokens_total"
SEQUENCES = "firsttoken_sequences"
KV_TRANSFER_BYTES_TOTAL = "firsttoken_kv_transfer_bytes_total"
KV_TRANSFER_EXPOSED_SECONDS = "firsttoken_kv_transfer_exposed_seconds"
KV_TRANSPORT_FALLBACKS_TOTAL = "firsttoken_kv_transport_fallbacks_total"
WASTED_TOKENS_TOTAL = "firsttoken_wasted_tokens_total"
IGNORED_FIELDS_TOTAL = "firsttoken_ignored_fields_total"

# 1 ms to 10 s: a release takes one decode step (tens of ms) or, at worst, one prefill chunk of a large model.
_RELEASE_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1,
    0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0,
)  # fmt: skip
# The buckets that OpenTelemetry's GenAI conventions ask for.
_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
# 0.1 ms to 5 s: the last layers of a chunk take some milliseconds; a receiver that is stuck is given up after 10 s.
_EXPOSED_BUCKETS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0,
)  # fmt: skip
_SEQUENCES_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


class Counter:
    """Only grows. `add()` may be called from any thread."""

    def __init__(self, instrument: CounterInstrument, labels: Mapping[str, str]) -> None:
        self._instrument = instrument
        self._labels = dict(labels)

    def add(self, amount: int) -> None:
        self._instrument.add(amount, self._labels)


class LabelledCounter:
    """A counter with one label, whose value is given with each `add`. Values come from a closed set."""

    def __init__(self, instrument: CounterInstrument, label: str) -> None:
        self._instrument = instrument
        self._label = label

    def add(self, value: str, amount: int = 1) -> None:
        self._instrument.add(amount, {self._label: value})


class ManyLabelled:
    """A counter whose labels are all given with each `add`. Values come from closed sets."""

    def __init__(self, instrument: CounterInstrument) -> None:
        self._instrument = instrument

    def add(self, amount: int, **labels: str) -> None:
        self._instrument.add(amount, labels)


class Histogram:
    """A distribution. `record()` may be called from any thread."""

    def __init__(self, instrument: HistogramInstrument, labels: Mapping[str, str]) -> None:
        self._instrument = instrument
        self._labels = dict(labels)
        self.is_empty = True

    def record(self, value: float) -> None:
        self.is_empty = False
        self._instrument.record(value, self._labels)


class ZeroHistogram(Collector):
    """A histogram before its first value, which OpenTelemetry leaves out: a rate needs zeros to start from."""

    def __init__(self, histogram: Histogram, name: str, bounds: Iterable[float], labels: Mapping[str, str]) -> None:
        self._histogram = histogram
        self._name = name
        self._buckets = [*((str(bound), 0.0) for bound in bounds), ("+Inf", 0.0)]
        self._labels = dict(labels)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        if self._histogram.is_empty:
            family = HistogramMetricFamily(self._name, self._name, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), self._buckets, 0.0)
            yield family


class Metrics:
    """The instruments of one process. `name` is the worker's id (or the service's name), in the label `worker`."""

    def __init__(self, role: str, name: str) -> None:
        self.role = role
        self.name = name
        self._registry = CollectorRegistry(auto_describe=False)
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self._registry)
        self._provider = MeterProvider(
            metric_readers=[reader],
            resource=Resource.create({"service.name": f"firsttoken-{role}", "service.instance.id": name}),
            shutdown_on_exit=False,
        )
        meter = self._meter = self._provider.get_meter("firsttoken")
        of_role = {"role": role}
        self.requests_total = LabelledCounter(
            meter.create_counter(REQUESTS_TOTAL, description="Requests that have ended"), "outcome"
        )
        self._refused_total = LabelledCounter(
            meter.create_counter(REFUSED_TOTAL, description="Late or fenced input that was dropped"), "kind"
        )
        self.ignored_fields = Counter(
            meter.create_counter(IGNORED_FIELDS_TOTAL, description="Fields of requests that had no effect"), {}
        )
        self.tokens_computed = Counter(
            meter.create_counter(TOKENS_COMPUTED_TOTAL, description="Tokens that went through the model"), of_role
        )
        self._prefix_cache_tokens = LabelledCounter(
            meter.create_counter(PREFIX_CACHE_TOKENS_TOTAL, description="Prompt tokens looked up in the prefix cache"),
            "result",
        )
        self._prefix_cache_evictions = Counter(
            meter.create_counter(PREFIX_CACHE_EVICTIONS_TOTAL, description="Cached blocks that gave way to new ones"),
            of_role,
        )
        self.requeues_total = LabelledCounter(
            meter.create_counter(REQUEUES_TOTAL, description="Attempts that were closed and followed by another"),
            "reason",
        )
        self.preemptions_total = LabelledCounter(
            meter.create_counter(PREEMPTIONS_TOTAL, description="Sequences that left and are replayed later"), "cause"
        )
        self.replayed_tokens = Counter(
            meter.create_counter(REPLAYED_TOKENS_TOTAL, description="Output tokens fed again in continued answers"), {}
        )
        self.wasted_tokens = ManyLabelled(
            meter.create_counter(WASTED_TOKENS_TOTAL, description="Tokens computed that no answer is made of")
        )
        self.kv_transfer_bytes = LabelledCounter(
            meter.create_counter(KV_TRANSFER_BYTES_TOTAL, description="KV sent in frames"), "transport"
        )
        self.kv_transport_fallbacks = LabelledCounter(
            meter.create_counter(KV_TRANSPORT_FALLBACKS_TOTAL, description="Transfers that lost their first choice"),
            "reason",
        )
        self.kv_transfer_exposed_seconds = Histogram(
            meter.create_histogram(
                KV_TRANSFER_EXPOSED_SECONDS,
                description="From the last prefill step of a prompt to the acknowledgement of all its KV and token 1",
                explicit_bucket_boundaries_advisory=_EXPOSED_BUCKETS_S,
            ),
            {},
        )
        self.cancel_release_seconds = Histogram(
            meter.create_histogram(
                CANCEL_RELEASE_SECONDS,
                description="From the request to cancel to the last block freed",
                explicit_bucket_boundaries_advisory=_RELEASE_BUCKETS_S,
            ),
            {},
        )
        self.step_sequences = Histogram(
            meter.create_histogram(
                STEP_SEQUENCES,
                description="Sequences in one engine step",
                explicit_bucket_boundaries_advisory=_SEQUENCES_BUCKETS,
            ),
            of_role,
        )
        self.time_to_first_token = Histogram(
            meter.create_histogram(
                TIME_TO_FIRST_TOKEN,
                unit="s",
                description="From the request received to the first text sent",
                explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BUCKETS_S,
            ),
            {},
        )

    def kv_blocks(self, provider: Callable[[], Mapping[str, int]]) -> None:
        """Block state -> count, asked at each scrape. Call once, in workers: tokens and steps, too, count from 0."""
        self.tokens_computed.add(0)
        of_role = {"role": self.role}
        self._registry.register(ZeroHistogram(self.step_sequences, STEP_SEQUENCES, _SEQUENCES_BUCKETS, of_role))
        labels = {"role": self.role, "worker": self.name}
        self._gauge(KV_BLOCKS, "Blocks of the KV pool", provider, labels, "state")
        self.prefix_looked_up(0, 0, 0)

    def prefix_looked_up(self, num_hit: int, num_missed: int, num_evicted: int) -> None:
        """Tokens of one prompt that were found in the cache and not, and the blocks evicted since the last call."""
        self._prefix_cache_tokens.add("hit", num_hit)
        self._prefix_cache_tokens.add("miss", num_missed)
        self._prefix_cache_evictions.add(num_evicted)

    def refused(self, kind: RefusedKind | ErrorCode) -> None:
        """One input that was dropped, or one request that was not admitted."""
        self._refused_total.add(kind.value.lower())

    def kv_transfers(self, *, transports: Iterable[str], fallback_reasons: Iterable[str]) -> None:
        """Call once, in prefill workers: bytes, fallbacks and exposed times count from 0."""
        for transport in transports:
            self.kv_transfer_bytes.add(transport, 0)
        for reason in fallback_reasons:
            self.kv_transport_fallbacks.add(reason, 0)
        exposed = self.kv_transfer_exposed_seconds
        self._registry.register(ZeroHistogram(exposed, KV_TRANSFER_EXPOSED_SECONDS, _EXPOSED_BUCKETS_S, {}))

    def requests(self, provider: Callable[[], Mapping[str, int]]) -> None:
        """Live state -> requests, asked at each scrape. Call once, in the scheduler: ends and releases count from 0."""
        for outcome in TERMINAL_STATES:
            self.requests_total.add(outcome.value, 0)
        self._registry.register(
            ZeroHistogram(self.cancel_release_seconds, CANCEL_RELEASE_SECONDS, _RELEASE_BUCKETS_S, {})
        )
        self._gauge(REQUESTS, "Live requests", provider, {}, "state")

    def active_streams(self, provider: Callable[[], int]) -> None:
        """Streams open to clients. Call once."""
        self._gauge(ACTIVE_STREAMS, "Streams open to clients", lambda: {"": provider()}, {}, None)

    def sequences(self, provider: Callable[[], Mapping[str, int]], *, preemption_causes: Iterable[str]) -> None:
        """Sequence state -> count, asked at each scrape. Call once, in decode workers: preemptions count from 0."""
        for cause in preemption_causes:
            self.preemptions_total.add(cause, 0)
        self.replayed_tokens.add(0)
        labels = {"role": self.role, "worker": self.name}
        self._gauge(SEQUENCES, "Sequences of a worker", provider, labels, "state")

    def tasks(self, provider: Callable[[], int]) -> None:
        """Tasks of the event loop. Call once."""
        self._gauge(TASKS, "Tasks of the event loop", lambda: {"": provider()}, {}, None)

    def open_calls(self, provider: Callable[[], int]) -> None:
        """Calls that the process serves to others. Call once, where there is a server."""
        self._gauge(OPEN_CALLS, "gRPC calls being served", lambda: {"": provider()}, {}, None)

    def outbox_tokens(self, provider: Callable[[], int]) -> None:
        """Tokens computed and not yet acknowledged. Call once."""
        labels = {"worker": self.name}
        self._gauge(OUTBOX_TOKENS, "Tokens not yet acknowledged", lambda: {"": provider()}, labels, None)

    def _gauge(
        self,
        name: str,
        description: str,
        provider: Callable[[], Mapping[str, int]],
        labels: Mapping[str, str],
        label: str | None,
    ) -> None:
        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            for value, count in provider().items():
                yield Observation(count, {**labels, label: value} if label else labels)

        self._meter.create_observable_gauge(name, callbacks=[observe], description=description)

    def render(self) -> bytes:
        """Prometheus text. Takes a millisecond or so: call it from the loop, whose state the providers read."""
        return generate_latest(self._registry)

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def close(self) -> None:
        self._provider.shutdown()
