"""Numbers of a run right now, for frameworks' loggers, counted from call to call.

Adapters hand them to what their framework logs with, so that TensorBoard, Weights & Biases and the
others show them beside the loss.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from deepytorch_core.metering import counts, step_timer
from deepytorch_core.metering.step_timer import Counters

PREFIX = "deepytorch/"

# Under these names frameworks and their scripts log the training loss.
_LOSSES = ("loss", "train_loss", "train/loss", "training_loss")


class Figures:
    """Numbers of the steps between two calls of `take`."""

    def __init__(self) -> None:
        self._state = self._now()

    def take(self) -> dict[str, float]:
        """Return the numbers since the last call; none if no step has ended since.

        * `step_ms`: how long a step took;
        * `exposed_share`, `data_share`: of the time, how much this rank spent in collectives that
          no computation hid, and waiting for data, 0 to 1;
        * `waited_share`: of the time, how long it waited in collectives for other ranks;
        * `straggler`: the rank of this node that the others waited for longest, and
          `straggler_share`: how long they did, of the time (together, so it may be above 1);
        * `operations` and `mbytes`: collectives of a step, and megabytes in them;
        * `native_share`: how many of them were native, 0 to 1.

        Waiting is that of native operations on host memory; what was not seen is left out.
        """
        before, self._state = self._state, self._now()
        steps = self._state.steps - before.steps
        seconds = self._state.at - before.at
        if steps <= 0 or seconds <= 0:
            return {}
        spent = self._state.counters.since(before.counters)
        found = {
            "step_ms": 1e3 * seconds / steps,
            "exposed_share": spent.exposed_s / seconds,
            "data_share": spent.data_s / seconds,
        }
        native = self._state.native - before.native
        calls = native + self._state.delegated - before.delegated
        if calls > 0:
            found["operations"] = calls / steps
            found["mbytes"] = max(0.0, self._state.nbytes - before.nbytes) / steps / 1e6
            found["native_share"] = native / calls
        costs = {
            rank: cost - before.costs.get(rank, 0.0) for rank, cost in self._state.costs.items()
        }
        if costs and max(costs.values()) > 0:
            slowest = max(costs, key=lambda rank: costs[rank])
            found["waited_share"] = spent.waited_s / seconds
            found["straggler"] = float(slowest)
            found["straggler_share"] = costs[slowest] / seconds
        return {PREFIX + name: round(value, 6) for name, value in found.items()}

    def _now(self) -> _State:
        return _State()


class _State:
    """All counters at a moment."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.steps = step_timer.current().steps
        self.counters: Counters = step_timer.counters()
        self.native = self.delegated = 0
        self.nbytes = 0.0
        for row in counts.statistics():
            if row["algorithm"] == "delegate":
                self.delegated += row["calls"]
            else:
                self.native += row["calls"]
            self.nbytes += row["bytes"]
        self.costs: dict[int, float] = {}  # rank of the node: seconds
        for group in counts.arrivals():
            for rank in group["ranks"]:
                waited = self.costs.get(rank["rank"], 0.0) + rank["cost_us"] / 1e6
                self.costs[rank["rank"]] = waited


def logged(values: Mapping[str, object], step: int | None = None) -> None:
    """Keep the loss that a framework logs, if there is one among `values`, for the report."""
    for name in _LOSSES:
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            step_timer.note_loss(value, step)
            return
