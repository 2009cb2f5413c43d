"""The Prometheus endpoint: what it says, whom it answers, and the dashboard that is made for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import deepytorch
from deepytorch_core.base import config, console
from deepytorch_core.base.config import Options
from deepytorch_core.metering import step_timer
from deepytorch_core.metering.step_timer import Course
from deepytorch_core.report import metrics
from deepytorch_core.testing import free_port

DASHBOARD = Path(__file__).parents[2] / "docs/assets/grafana.json"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Serve the metrics of this process; return where."""
    seen = Course()
    seen.note_loss(0.25)
    monkeypatch.setattr(step_timer, "_course", seen)
    found = metrics.serve("0")
    assert found is not None
    yield found
    metrics.stop()


def ask(place: tuple[str, int], path: str, method: str = "GET") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(*place, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    try:
        return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()
    finally:
        connection.close()


def test_every_metric_is_served_with_its_labels(
    place: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One sample of everything.
    found = {
        name: (name, ("x",) * len(metric.labels), 1.5) for name, metric in metrics.METRICS.items()
    }
    real = list(metrics.samples())
    assert {name for name, *_ in real} <= metrics.METRICS.keys()
    assert all(len(labels) == len(metrics.METRICS[name].labels) for name, labels, _ in real)
    assert ("deepytorch_loss", (), 0.25) in real
    monkeypatch.setattr(metrics, "samples", lambda: [*found.values(), *found.values()])
    status, kind, text = ask(place, "/metrics")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() == metrics.METRICS.keys()
    for name, metric in metrics.METRICS.items():
        (sample,) = families[name].samples
        assert families[name].type == metric.kind
        assert sample.labels == {"rank": "0", **dict.fromkeys(metric.labels, "x")}
        assert sample.value == 3.0, "of one name they are added up"


def test_idle_and_slow_clients_keep_few_threads_and_nobody_else_out(
    place: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 0.5)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(place, timeout=10))
            for _ in range(3 * metrics.MOST_CONNECTIONS)
        ]
        for number, client in enumerate(clients):
            client.sendall(b"GET /met" if number % 2 else b"")
        most = before
        ended = 0
        for client in clients:  # refused at once, or when their time is over
            with contextlib.suppress(ConnectionError):
                while client.recv(100):
                    most = max(most, threading.active_count())
            most = max(most, threading.active_count())
            ended += 1
        assert ended == len(clients)
        assert most - before <= metrics.MOST_CONNECTIONS
        assert ask(place, "/metrics")[0] == 200


def test_nothing_else_is_answered(place: tuple[str, int]) -> None:
    assert place[0] == "127.0.0.1"
    assert ask(place, "/metrics?name=x")[0] == 200
    for path in ("/", "/metrics/", "/metricsx", "/../metrics", "/%6detrics"):
        assert ask(place, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(place, "/metrics", method)[0] == 501, method


def test_options_start_and_stop_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    was_active = deepytorch.is_active()
    monkeypatch.setenv("RANK", "0")  # else only from its first group or step on
    monkeypatch.setenv("WORLD_SIZE", "1")
    deepytorch.deactivate()
    deepytorch.activate(metrics="localhost:0")
    line = capsys.readouterr().err
    found = re.search(r"metrics of rank 0 at http://127.0.0.1:(\d+)/metrics", line)
    assert found is not None
    place = ("127.0.0.1", int(found[1]))
    deepytorch.activate(log="warning")  # the same place
    assert ask(place, "/metrics")[0] == 200
    deepytorch.deactivate()
    with pytest.raises(ConnectionRefusedError):
        ask(place, "/metrics")
    if was_active:
        deepytorch.activate()


def test_the_local_rank_is_added_and_a_port_in_use_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert metrics.serve(str(port - 3)) is None
    assert (
        f"metrics of rank 0 are not served at 127.0.0.1:{port}: another process has this port"
    ) in capsys.readouterr().err


def test_without_a_launcher_it_waits_for_a_group_or_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_timer, "_course", Course())
    monkeypatch.setattr(console, "_joined_as", None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    port = free_port()
    try:
        with monkeypatch.context() as launched:
            launched.setenv("RANK", "0")
            launched.setenv("WORLD_SIZE", "1")
            launched.setattr(metrics.multiprocessing, "parent_process", object)
            metrics.begin(str(port))  # a child of a rank's
        metrics.begin(str(port))
        assert capsys.readouterr().err == ""
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        step_timer._stepped(optimizer, (), {})
        assert ask(("127.0.0.1", port), "/metrics")[0] == 200
        step_timer._stepped(optimizer, (), {})
        console.joined_as(2)  # as in a group that it makes later
        assert ask(("127.0.0.1", port + 2), "/metrics")[0] == 200
        with pytest.raises(ConnectionRefusedError):
            ask(("127.0.0.1", port), "/metrics")
    finally:
        metrics.stop()
    assert [line.rpartition("/")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"deepytorch: metrics of rank 0 at http://127.0.0.1:{port}",
        f"deepytorch: metrics of rank 2 at http://127.0.0.1:{port + 2}",
    ]
    console.joined_as(1)
    assert capsys.readouterr().err == "", "it has been stopped"


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(RuntimeError, match=r"pip install 'deepytorch-train\[metrics\]'"):
        metrics.serve("0")


def test_a_forked_child_keeps_no_port_open(place: tuple[str, int]) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"y" if metrics._served is None else b"n")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.close(write)
    assert ask(place, "/metrics")[0] == 200, "the parent's goes on"


@pytest.mark.parametrize(
    ("value", "host", "port"),
    [
        (9400, "127.0.0.1", 9400),
        (" 0 ", "127.0.0.1", 0),
        ("0.0.0.0:9400", "0.0.0.0", 9400),
        ("[::1]:9400", "::1", 9400),
        ("node7:1", "node7", 1),
    ],
)
def test_places(value: object, host: str, port: int) -> None:
    given = Options.from_mapping({"metrics": value}).metrics
    assert given is not None
    assert config.host_and_port(given) == (host, port)


@pytest.mark.parametrize("value", [True, "on", ":9400", "host:", "65536", "-1", "::1:9400", "1.5"])
def test_what_is_no_place_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected PORT or HOST:PORT"):
        Options.from_mapping({"metrics": value})


def test_the_dashboard_asks_for_what_is_served() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [
        variable["query"]["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    served = {
        name + ("_total" if metric.kind == "counter" else ""): metric.labels
        for name, metric in metrics.METRICS.items()
    }
    asked = {name for query in queries for name in re.findall(r"\bdeepytorch_\w+", query)}
    assert asked == served.keys(), "each is on a panel, and nothing else"
    page = (DASHBOARD.parents[1] / "live.md").read_text()
    assert asked <= set(re.findall(r"`(deepytorch_\w+)`", page)), "documented"
    for query in queries:
        names = re.findall(r"\bdeepytorch_\w+", query)
        known = {label for name in names for label in served[name]} | {"rank", "job"}
        used = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"(\w+)=~?\"", query)
        labels = {label.strip() for part in used for label in part.split(",")}
        assert labels <= known, query
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = re.search(r"by \(([^)]*)\)", target["expr"])
            if grouped is not None:
                assert shown == {label.strip() for label in grouped[1].split(",")}, panel["title"]
