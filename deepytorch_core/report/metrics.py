"""Prometheus metrics of this process, served over HTTP where option `metrics` asks for it.

Every rank serves its own, at the port that was asked for plus its local rank. So no rank has to
collect anything, and one that hangs or dies takes nobody's metrics with it. Nothing but GET
/metrics is answered.

A script that starts its ranks itself runs in more processes than its ranks: the one that starts
them, and the workers of DataLoaders. None of these may take a rank's port.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, NamedTuple

from deepytorch_core.base import config, decisions, distribution, memory
from deepytorch_core.base.console import global_rank, has_joined, say, when_joined
from deepytorch_core.metering import counts, step_timer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PATH = "/metrics"
MOST_CONNECTIONS = 16
"""At a time, each with a thread; further ones are closed at once."""
REQUEST_S = 5.0
"""Seconds from a connection to the end of its answer; it is closed then."""
INSTALL = "pip install 'deepytorch-train[metrics]'"


class Described(NamedTuple):
    """A metric: its kind, what it is, and its labels besides `rank`."""

    kind: str
    text: str
    labels: tuple[str, ...] = ()


METRICS = {
    "deepytorch_operations": Described(
        "counter", "Collectives and messages.", ("op", "algorithm", "native")
    ),
    "deepytorch_operation_bytes": Described(
        "counter", "Bytes in them, of one buffer each.", ("op", "algorithm", "native")
    ),
    "deepytorch_operation_seconds": Described(
        "counter", "Seconds of native ones, from start to end.", ("op", "algorithm", "native")
    ),
    "deepytorch_exposed_seconds": Described(
        "counter", "Seconds in collectives on host memory that no computation hid."
    ),
    "deepytorch_waited_seconds": Described(
        "counter", "Seconds waited in native collectives on host memory for other ranks."
    ),
    "deepytorch_straggler_seconds": Described(
        "counter", "Seconds that the others of the node waited for one rank.", ("straggler",)
    ),
    "deepytorch_straggler_operations": Described(
        "counter", "Operations to which one rank of the node came last.", ("straggler",)
    ),
    "deepytorch_data_seconds": Described("counter", "Seconds waited for DataLoaders."),
    "deepytorch_tuning_seconds": Described("counter", "Seconds spent measuring plans."),
    "deepytorch_steps": Described("counter", "Optimizer steps."),
    "deepytorch_step_seconds": Described(
        "counter", "Seconds of those that were timed: all but the first."
    ),
    "deepytorch_decisions": Described(
        "gauge", "Choices that were made, by whether stock stays.", ("kept",)
    ),
    "deepytorch_failures": Described("counter", "Operations that ended in an error."),
    "deepytorch_peak_memory_bytes": Described(
        "gauge", "Most memory used at once, of the process and of each GPU.", ("place",)
    ),
    "deepytorch_loss": Described("gauge", "The loss that was logged last."),
    "deepytorch_info": Described("gauge", "Always 1.", ("version", "host")),
}
"""Every metric by its name; a counter's samples have `_total` after it."""

Sample = tuple[str, tuple[str, ...], float]


def samples() -> Iterator[Sample]:
    """(metric, values of its labels, value) of all that is known now."""
    from deepytorch_core.report.summary import report

    now = report(recent=False)
    for row in now.rows:
        labels = (row.op, row.algorithm, str(row.algorithm != "delegate").lower())
        yield "deepytorch_operations", labels, row.calls
        yield "deepytorch_operation_bytes", labels, row.bytes
        yield "deepytorch_operation_seconds", labels, row.time_us / 1e6
    spent = step_timer.counters()
    yield "deepytorch_exposed_seconds", (), spent.exposed_s
    yield "deepytorch_waited_seconds", (), spent.waited_s
    yield "deepytorch_data_seconds", (), spent.data_s
    yield "deepytorch_tuning_seconds", (), spent.tuning_s
    for group in counts.arrivals():
        for rank in group["ranks"]:
            yield "deepytorch_straggler_seconds", (str(rank["rank"]),), rank["cost_us"] / 1e6
            yield "deepytorch_straggler_operations", (str(rank["rank"]),), rank["times_last"]
    yield "deepytorch_steps", (), now.course["steps"]
    yield "deepytorch_step_seconds", (), now.course["seconds"]
    stock = sum(decisions.is_stock(decision) for decision in now.decisions)
    yield "deepytorch_decisions", ("true",), len(now.decisions) - stock
    yield "deepytorch_decisions", ("false",), stock
    yield "deepytorch_failures", (), now.failures
    used = memory.used()
    if "host_peak_bytes" in used:
        yield "deepytorch_peak_memory_bytes", ("host",), used["host_peak_bytes"]
    for gpu in used["devices"]:
        yield "deepytorch_peak_memory_bytes", (gpu["device"],), gpu["peak_bytes"]
    if now.course["losses"]:
        yield "deepytorch_loss", (), now.course["losses"][-1][1]
    yield "deepytorch_info", (distribution.version(), now.host), 1


class _Collector:
    """The collector that prometheus_client asks at every request."""

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        rank = str(global_rank())
        sums: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}
        for name, labels, value in samples():  # groups of one name are added up
            sums[name][labels] = sums[name].get(labels, 0.0) + value
        for name, metric in METRICS.items():
            family = kinds[metric.kind](name, metric.text, labels=["rank", *metric.labels])
            for labels, value in sums[name].items():
                family.add_metric([rank, *labels], value)
            yield family


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "deepytorch", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, f"only {PATH} is served")
            return
        from prometheus_client import exposition

        encode, kind = exposition.choose_encoder(self.headers.get("Accept") or "")
        body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are nothing to tell."""


class _Server(ThreadingMixIn, TCPServer):  # not HTTPServer, which asks DNS for the host's name
    daemon_threads = True
    allow_reuse_address = True
    registry: CollectorRegistry

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._until: dict[Any, float] = {}  # by connection
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, unless there are too many."""
        if len(self._until) >= MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._until[request] = time.monotonic() + REQUEST_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered."""
        self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections whose time is over, however slowly they send; called now and then."""
        now = time.monotonic()
        for request, until in list(self._until.items()):
            if now > until:
                with contextlib.suppress(OSError):  # closed by its thread meanwhile
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to tell."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self.server_address[:2]
        return str(host), int(port)


_lock = threading.Lock()
_wanted: str | None = None  # what the option says, while it is in force
_tried: tuple[str, int] | None = None  # what was asked for last, and the local rank then
_served: _Server | None = None  # who serves that


def begin(where: str) -> None:
    """`serve` as soon as this process is known to be a rank, and again where its rank changes.

    That is at once for whom a launcher gave a rank, else from the first group or optimizer step on.

    Raises RuntimeError when prometheus_client is not installed.
    """
    global _wanted
    _new_registry(where)
    _wanted = where
    when_joined(_serve_wanted)
    step_timer.at_first_step(_serve_wanted)
    # A rank's children have its variables, too: the workers of a DataLoader for instance.
    is_child = multiprocessing.parent_process() is not None
    launched = not is_child and config.launched() is not None
    if launched or has_joined() or step_timer.current().steps:
        serve(where)


def _serve_wanted() -> None:
    if _wanted is not None and _tried != (_wanted, _local_rank()):
        serve(_wanted)


def _local_rank() -> int:
    """Return the number to add to the port: the local rank, or the rank if nobody told it."""
    return config.local_rank(default=global_rank())


def _new_registry(where: str) -> CollectorRegistry:
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError:
        raise RuntimeError(
            f"metrics={where} needs prometheus_client, which is not installed: {INSTALL}, or leave "
            "the option out"
        ) from None
    return CollectorRegistry(auto_describe=False)


def serve(where: str) -> tuple[str, int] | None:
    """Serve this process's metrics from now on, in a thread; once for all calls with one `where`.

    Args:
        where: `PORT` or `HOST:PORT`; without a host the loopback interface, with port 0 any that
            is free.

    Returns host and port; None when the address can't be had, which is said in a line. Raises
    RuntimeError when prometheus_client is not installed.
    """
    global _served, _tried
    registry = _new_registry(where)
    with _lock:
        asked = (where, _local_rank())
        if _served is not None and _tried == asked:
            return _served.address
        _stop()
        _tried = asked
        host, port = config.host_and_port(where)
        if port:
            port += asked[1]
        registry.register(_Collector())
        server = None
        try:
            server = _Server(host, port)
            server.registry = registry
            threading.Thread(
                target=server.serve_forever, args=(0.2,), name="deepytorch metrics", daemon=True
            ).start()
        except (OSError, OverflowError, RuntimeError) as error:  # or there are too many threads
            if server is not None:
                server.server_close()
            why = str(error)
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                why = "another process has this port, give option metrics another"
            line = f"metrics of rank {global_rank()} are not served at {host}:{port}: {why}"
            say(line, level="warning")
            return None
        _served = server
        host, port = server.address
        say(f"metrics of rank {global_rank()} at http://{host}:{port}{PATH}")
        return server.address


def stop() -> None:
    """Serve no more."""
    global _wanted
    with _lock:
        _wanted = None
        _stop()


def _stop() -> None:
    global _served, _tried
    server, _served, _tried = _served, None, None
    if server is not None:
        server.shutdown()
        server.server_close()


def _forget_in_child() -> None:
    """A forked child has no thread that serves, and must not keep the port open."""
    global _served, _tried, _lock
    _lock = threading.Lock()
    if _served is not None:
        _served.socket.close()
    _served = _tried = None


os.register_at_fork(after_in_child=_forget_in_child)
