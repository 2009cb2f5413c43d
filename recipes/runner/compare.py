# SPDX-License-Identifier: Apache-2.0
"""``--compare``: two arms in the same processes, the samples they give, and their report.

The arms take turns on the same batch, in the order stock-ours, ours-stock, stock-ours and so on. So
a machine that gets slower or faster with time treats both alike. A step is timed between two
barriers of a third group: its time is that of the slowest rank, and includes one barrier in either
arm. Ratios are formed per mirrored pair of steps. That is four neighbouring times, two of each arm
on the same two batches, each arm once first and once second.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

import deepytorch
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process, console
from deepytorch.recipes.runner import rounding
from deepytorch.recipes.runner.rounding import Drift

ARMS = ("stock", "ours")

# The first steps allocate, rebuild DDP's buckets and connect: their losses count, their times not.
# Even, so that the timed steps begin with a mirrored pair.
NUM_WARMUP_STEPS = 4


def order_of(step: int) -> tuple[str, str]:
    """The arms in the order in which they take step ``step`` (counted from 1)."""
    return ("stock", "ours") if step % 2 else ("ours", "stock")


@dataclass
class Timer:
    """Filled when its ``timed`` block ends."""

    seconds: float = 0.0


@contextmanager
def timed(device: torch.device) -> Iterator[Timer]:
    """Time a block from the moment all ranks enter it until the last one has left it."""
    timer = Timer()
    _all_ranks_idle(device)
    start = time.perf_counter()
    yield timer
    _all_ranks_idle(device)
    timer.seconds = time.perf_counter() - start


def _all_ranks_idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """The spread of at least one sample."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass
class Comparison:
    """Every sample of both arms; all losses are means over all ranks' tokens."""

    backends: dict[str, str]  # of stock, ours and perhaps _rounding.ARM
    unit: str = "tokens"
    draws_others: bool = False  # whether dropout leaves out other parts in each arm
    losses: dict[str, list[float]] = field(init=False)
    step_time_s: dict[str, list[float]] = field(init=False)
    num_units: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = {arm: [] for arm in self.backends}
        self.step_time_s = {arm: [] for arm in self.backends}
        self.num_units = {arm: [] for arm in self.backends}

    def add(self, arm: str, loss: float, seconds: float, num_units: int) -> None:
        """Append one step of ``arm``; ``num_units`` counts all ranks' units."""
        self.losses[arm].append(loss)
        self.step_time_s[arm].append(seconds)
        self.num_units[arm].append(num_units)

    def last(self, arm: str) -> dict[str, float]:
        """The latest step of ``arm`` as scalars to log."""
        seconds = self.step_time_s[arm][-1]
        return {
            "loss": self.losses[arm][-1],
            "step_time_s": seconds,
            f"{self.unit}_per_s": self.num_units[arm][-1] / seconds,
        }

    def progress_text(self) -> str:
        """Return where both arms stand, for the progress bar."""
        return (
            f"loss {self.losses['stock'][-1]:.4f} stock, {self.losses['ours'][-1]:.4f} ours  "
            f"step {self.step_time_s['stock'][-1] * 1e3:.0f} ms, "
            f"{self.step_time_s['ours'][-1] * 1e3:.0f} ms"
        )

    @property
    def loss_difference(self) -> float:
        """The largest absolute difference of the two loss curves; nan if either has a nan."""
        differences = [
            abs(a - b) for a, b in zip(self.losses["stock"], self.losses["ours"], strict=True)
        ]
        # max() alone would step over a nan.
        return next((value for value in differences if value != value), max(differences))

    @property
    def num_warmup_steps(self) -> int:
        """Steps left out of the times; at least one step is kept."""
        return min(NUM_WARMUP_STEPS, len(self.step_time_s["stock"]) - 1)

    def timed_steps(self, arm: str) -> list[float]:
        """The step times of ``arm`` in seconds, after the warm-up."""
        return self.step_time_s[arm][self.num_warmup_steps :]

    def units_per_s(self, arm: str) -> float:
        """Units of all ranks per second, without padding, after the warm-up."""
        return sum(self.num_units[arm][self.num_warmup_steps :]) / sum(self.timed_steps(arm))

    @property
    def ratios(self) -> list[float]:
        """Step time of stock / ours by mirrored pair of steps: above 1 deepytorch is faster."""
        stock, ours = self.timed_steps("stock"), self.timed_steps("ours")
        if len(stock) < 2:
            return [stock[0] / ours[0]]
        # An odd step at the end has no mirror image.
        starts = range(0, len(stock) - 1, 2)
        return [sum(stock[i : i + 2]) / sum(ours[i : i + 2]) for i in starts]

    def drift(self, arm: str) -> Drift:
        """How the curve of ``arm`` lies apart from stock's."""
        return Drift.of(self.losses[arm], self.losses["stock"])

    def verdict(self, tolerance: float) -> str | None:
        """None when the losses agree, else the sentence that says by how much they do not."""
        if self.loss_difference <= tolerance:
            return None
        if rounding.ARM in self.backends:
            return self.drift("ours").verdict(self.drift(rounding.ARM), tolerance)
        return (
            f"the loss curves of stock and deepytorch differ by {self.loss_difference:.3g}, more "
            f"than loss_tolerance={tolerance:g}: the two runs are not equivalent"
        )

    def to_dict(self) -> dict[str, Any]:
        """Summary and all samples, ready for JSON."""
        ratio = Spread.of(self.ratios)
        return {
            "loss_difference": self.loss_difference,
            "draws_others": self.draws_others,
            "step_ratio": ratio.median,
            "step_ratio_quartiles": [ratio.low, ratio.high],
            "step_ratios": self.ratios,
            "num_warmup_steps": self.num_warmup_steps,
            "order": [list(order_of(step + 1)) for step in range(len(self.losses["stock"]))],
            "arms": {
                arm: {
                    "backend": self.backends[arm],
                    "final_loss": self.losses[arm][-1],
                    "median_step_time_s": Spread.of(self.timed_steps(arm)).median,
                    "tokens_per_s": self.units_per_s(arm),
                    "losses": self.losses[arm],
                    "step_time_s": self.step_time_s[arm],
                    "num_tokens": self.num_units[arm],
                }
                for arm in self.backends
            },
            "drift": {arm: asdict(self.drift(arm)) for arm in self.backends if arm != "stock"},
        }


def write_results(
    recipe: str,
    comparison: Comparison,
    run_dir: Path,
    config: dict[str, Any],
    process: Process,
) -> None:
    """Write compare.json (every sample, machine, versions, commit) and compare.png."""
    verdict = comparison.verdict(config["loss_tolerance"])
    from deepytorch_core.base import provenance

    report = deepytorch.report()
    result = {
        "recipe": recipe,
        "unit": comparison.unit,
        "world_size": process.world_size,
        "device": process.device.type,
        "config": config,
        **comparison.to_dict(),
        "not_equivalent": verdict,
        "native_calls": report.native_calls,
        "delegated_calls": report.delegated_calls,
        # Only those of what computes have a "what".
        "decisions": [decision for decision in report.decisions if "what" in decision],
        "machine": provenance.machine_info(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
    }
    try:
        text = json.dumps(result, indent=1)
        (run_dir / "compare.json").write_text(text + "\n", encoding="utf-8")
        plot(comparison, run_dir / "compare.png", verdict)
    except OSError as error:
        raise RecipeError(f"cannot write the comparison to {run_dir}: {error}") from error


def plot(comparison: Comparison, path: Path, verdict: str | None) -> None:
    """Both loss curves, their difference, and how both arms' step times are distributed.

    No ratio of times where ``verdict`` says that the runs are not equivalent.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    curves, times = figure.subplots(1, 2)
    steps = range(1, len(comparison.losses["stock"]) + 1)
    stock_name, our_name = comparison.backends["stock"], comparison.backends["ours"]
    curves.plot(steps, comparison.losses["stock"], color="0.6", linewidth=4, label=stock_name)
    if rounding.ARM in comparison.losses:
        again = comparison.losses[rounding.ARM]
        label = f"{stock_name}, weights differ by rounding"
        curves.plot(steps, again, color="C1", linewidth=0.8, label=label)
    curves.plot(steps, comparison.losses["ours"], color="C0", linewidth=1.2, label=our_name)
    curves.set(
        xlabel="optimizer step",
        ylabel="loss",
        title=f"largest difference {comparison.loss_difference:.2g}",
    )
    curves.legend()
    milliseconds = [[value * 1e3 for value in comparison.timed_steps(arm)] for arm in ARMS]
    times.hist(milliseconds, bins=20, color=["0.6", "C0"], label=[stock_name, our_name])
    ratio = Spread.of(comparison.ratios)
    title = f"stock / ours: {ratio.median:.3f}x ({ratio.low:.3f} to {ratio.high:.3f})"
    if verdict is not None:
        title = "the losses differ: no ratio is claimed"
    times.set(xlabel="step time, ms", ylabel="steps", title=title)
    times.legend()
    figure.savefig(path, dpi=130)


def print_table(comparison: Comparison, run_dir: Path, tolerance: float) -> None:
    """Print what was found and where the files are."""
    table = Table(title="stock and deepytorch on the same data, seed and initial weights")
    table.add_column()
    arms = list(comparison.backends)
    for arm in arms:
        table.add_column(f"{arm} ({comparison.backends[arm]})", justify="right")
    steps = {arm: Spread.of(comparison.timed_steps(arm)) for arm in arms}
    times = (f"{each.low * 1e3:.1f} to {each.high * 1e3:.1f} ms" for each in steps.values())
    table.add_row("first loss", *(f"{comparison.losses[arm][0]:.6f}" for arm in arms))
    table.add_row("final loss", *(f"{comparison.losses[arm][-1]:.6f}" for arm in arms))
    table.add_row("step time, median", *(f"{steps[arm].median * 1e3:.1f} ms" for arm in arms))
    table.add_row("step time, quartiles", *times)
    table.add_row(f"{comparison.unit}/s", *(f"{comparison.units_per_s(arm):,.0f}" for arm in arms))
    console.print(table)

    ratio, report = Spread.of(comparison.ratios), deepytorch.report()
    told = (
        f"{ratio.median:.3f}x stock/ours, median; middle half {ratio.low:.3f} to "
        f"{ratio.high:.3f}; above 1 deepytorch is faster"
    )
    if comparison.verdict(tolerance) is not None:
        told = "not claimed: the two runs are not equivalent, by their losses"
    nothing = "" if report.native_calls else ": both arms ran the stock collectives"
    for label, text in (
        ("loss difference", _difference_text(comparison, tolerance)),
        ("step ratio", told),
        (
            "collectives",
            f"{report.native_calls} native, {report.delegated_calls} delegated{nothing}",
        ),
        ("plot", str(run_dir / "compare.png")),
        ("samples", str(run_dir / "compare.json")),
        ("scalars", str(run_dir / "tensorboard")),
    ):
        console.print(f"{label:<16}{text}", highlight=False)


def _difference_text(comparison: Comparison, tolerance: float) -> str:
    most = f"at most {comparison.loss_difference:.3g}"
    if rounding.ARM not in comparison.backends:
        return f"{most} (limit {tolerance:g})"
    ours, again = comparison.drift("ours"), comparison.drift(rounding.ARM)
    told = (
        f"{most}; in the second half {ours.size:.3g} on average, where two stock runs lie "
        f"{again.size:.3g} apart"
    )
    return f"{told}, both with dropout of their own" if comparison.draws_others else told
