"""Records of measurements: JSON lines that name the machine, the versions and the commit."""

from collections.abc import Mapping
from typing import Any

COLLECTIVE_FIELDS = (
    "op",
    "bytes",
    "bytes_per_rank",
    "per_rank",
    "dtype",
    "world_size",
    "device",
    "registered",
    "direct",
    "cuda_graph",
    "calls_per_graph",
    "compute_us",
    "algorithm",
    "tuned",
    "time_us",
    "cpu_us",
    "baseline",
    "baseline_algorithm",
    "baseline_time_us",
    "baseline_cpu_us",
    "speedup",
    "speedup_spread",
    "num_blocks",
    "algbw_gbps",
    "busbw_gbps",
    "wrong",
    "baseline_wrong",
    "emulated",
    "baseline_settings",
    "machine",
    "versions",
    "commit",
)
"""The fields that `bench collectives` writes. `bytes` is nccl-tests' size, `bytes_per_rank` one
rank's part of it; with `per_rank` the sizes of the run were asked for as the latter. With
`cuda_graph` times are GPU time of a call in replays of `calls_per_graph` (else None) of them.
`compute_us` is None, or how long the matrix products take alone whose time each call's is
together with; older records don't have it. Nor have they `tuned`, which says what ours went by in
the row, for each kind of group that was measured; it is empty where a rule decided. It has the
algorithm, the percentage of the message that the stock backend has (`delegated`), and where that is
from (`source`). It has the size that was measured and every candidate's `median_us`, too. `cpu_us`
and `baseline_cpu_us` are the CPU's time to enqueue a call on a GPU. They are None where calls were
not made from the CPU or not measured so. `baseline_algorithm` is "" unless the baseline has several
ways, of which the fastest was taken. `emulated` is None for ranks on the machine as it is, else the
nodes and the network that were emulated. It has each node's number of ranks, their order, each
link's rate and each TCP flow's cap in Mbit/s, and the delay in ms. It also says whether the arms
were processes of their own, and how many `gpus` there were where ranks of different nodes share
them."""

DDP_FIELDS = (
    "bench",
    "model",
    "part",
    "parameters",
    "dtype",
    "precision",
    "image_size",
    "batch_size",
    "world_size",
    "device",
    "registered",
    "algorithm",
    "bytes_per_step",
    "steps",
    "num_blocks",
    "step_time_us",
    "samples_per_s",
    "baseline",
    "baseline_step_time_us",
    "baseline_samples_per_s",
    "speedup",
    "speedup_spread",
    "improvement_percent",
    "loss",
    "baseline_loss",
    "loss_difference",
    "loss_check",
    "wrong",
    "choices",
    "emulated",
    "baseline_settings",
    "machine",
    "versions",
    "commit",
)
"""The fields that `bench ddp` writes. Times are percentiles ("p50", ...) of the slowest rank's step
in microseconds, samples_per_s a rank's at each. `part` says what of ours took part: "collectives",
which buckets are of, or "all"; "all-bf16" and "stock-bf16" also send gradients as bfloat16, by
our hook and, without ours, by torch's. `image_size` is None for what sees no images; `num_blocks`
are rounds where each arm is a process of its own; `choices` what was kept, layer by layer. `wrong`
is 1 when the losses differ by more than the order of additions explains, or rounding where ours
computes too. Older records lack part, precision, image_size, choices and emulated."""
PARTS_OF_DDP: Mapping[str, str] = {
    "collectives": "collectives and buckets",
    "all": "all",
    "stock-bf16": "nothing, gradients sent as bf16 by torch's hook",
    "all-bf16": "all, gradients sent as bf16",
}
"""Our parts that took part, in words."""

TRAIN_FIELDS = (
    "bench",
    "framework",
    "framework_version",
    "parameters",
    "dtype",
    "batch_size",
    "world_size",
    "device",
    "emulated",
    "adapter_us",
    "native_calls",
    "delegated_calls",
    "steps",
    "num_blocks",
    "round_speedups",
    "step_time_us",
    "baseline",
    "baseline_step_time_us",
    "speedup",
    "speedup_spread",
    "loss",
    "baseline_loss",
    "loss_difference",
    "loss_check",
    "wrong",
    "baseline_settings",
    "machine",
    "versions",
    "commit",
)
"""The fields that `bench train` writes. Times are medians of the slowest rank's step in
microseconds. `adapter_us` is what the adapter's own Python takes of it at most, measured apart.
Calls are those of the timed steps, over all ranks. `round_speedups` are those of each round of
fresh processes. `emulated` is None on the machine's own network. Older records, of one round, have
neither of these two. `wrong` as for `bench ddp`."""

COMPILE_FIELDS = (
    "bench",
    "workload",
    "world_size",
    "engine",
    "device",
    "dtype",
    "parameters",
    "batch_size",
    "stock",
    "stock_per_s",
    "ours_per_s",
    "plain_per_s",
    "speedup",
    "speedup_spread",
    "plain_speedup",
    "plain_speedup_spread",
    "num_blocks",
    "loss_max_diff",
    "plain_loss_max_diff",
    "loss_check",
    "stock_peak_gib",
    "ours_peak_gib",
    "plain_peak_gib",
    "kept",
    "reason",
    "dropped",
    "warmup_s",
    "plain_warmup_s",
    "warmup_steps",
    "warmup_phases_s",
    "wrong",
    "baseline_settings",
    "machine",
    "versions",
    "commit",
)
"""The fields that `bench compile` writes. `plain` is torch.compile as it comes; ..._per_s are
samples per second. Losses are compared over the first steps, relative to eager's. Warm-up is
seconds beyond what the steps take by themselves, nothing cached. `warmup_phases_s` says what ours
went into; older records don't have it."""
WORKLOAD_FIELDS = (
    "bench",
    "workload",
    "title",
    "scale",
    "world_size",
    "device",
    "micro_batch",
    "precision",
    "zero_stage",
    "lengths",
    "shape",
    "layers",
    "all_layers",
    "parameters",
    "unit",
    "rounds",
    "steps",
    "arms",
    "tuned",
    "against_plain",
    "against_tuned",
    "collectives_only",
    "compute_only",
    "claim",
    "loss_difference",
    "loss_check",
    "wrong",
    "engine",
    "stock",
    "stock_per_s",
    "ours_per_s",
    "speedup",
    "speedup_spread",
    "loss_max_diff",
    "stock_peak_gib",
    "ours_peak_gib",
    "emulated",
    "machine",
    "versions",
    "commit",
)
"""The fields that `bench train --workload` writes. `arms` has each arm's times, speed, memory and
losses; `tuned` is the fastest arm of the documentation's. A speed-up is [median, lower and upper
quartile] of the ratios of steps, see `pairs.py`, or None where an arm was left out. In older
records the first value was all steps' time over ours'. `claim` is the modelled product's. Losses
are compared over the first steps, relative, between all arms. From `engine` to `ours_peak_gib` it
is plain and ours alone, named as in other records: units per second, GiB, None where the arm was
left out; older records don't have them. `together` is there, and true, where both arms were in each
process; their memory is then that of both."""

_OF_SCRIPTS_RUNS = (
    *("busy", "kernels_per_step", "first_step_s", "to_steady_s", "steady_from", "longest_s"),
    "peak_gib",
)
_SCRIPT_ARMS = ("stock", "ours", "second")
SCRIPT_FIELDS = (
    "bench",
    "script",
    "repository",
    "script_commit",
    "arguments",
    "size",
    "goal",
    "ranks",
    "device",
    *(f"{arm}_ms" for arm in _SCRIPT_ARMS),
    "speedup",
    "speedup_spread",
    "second_speedup",
    "second_speedup_spread",
    "num_steps",
    "rounds",
    *(f"{arm}_{name}" for arm in _SCRIPT_ARMS for name in _OF_SCRIPTS_RUNS),
    "tokens",
    "peer",
    "compared_steps",
    "loss_steps",
    *(f"{arm}_losses" for arm in _SCRIPT_ARMS),
    "loss_difference",
    "loss_check",
    "wrong",
    "kept",
    "second_kept",
    "seams",
    "decisions",
    "second_decisions",
    "baseline",
    "remarks",
    "machine",
    "versions",
    "commit",
)
"""The fields that `bench scripts` writes. `ours` is from empty caches and an empty profile, and
`second` with what that run has kept. Times of a steady step are [lower quartile, median, upper
quartile] in milliseconds, of the last steps before the profile. The spread of a speed-up is from
the ratio of nearer quartiles to that of farther ones, over `num_steps` or more of each arm. An
arm's first run gives the share of time in which the GPU computes (None on the CPU) and kernels a
step. It gives seconds from the process's start to its first step, and from there until steps were
steady, and at which step (None: at none). The longest step after the first and memory are from it,
too. `tokens` has each arm's real tokens per second, padding left out, and its share of the GPU's
rate of bfloat16 products, both of `num_steps`; `peer` the same of another public way to train, by
its name and arguments. Either is None where it was not measured. Losses are compared over
`compared_steps`, and kept of `loss_steps`; `loss_check` says what is wrong with them.
`script_commit` is what was checked out or, where that is not known, the row's with
"-unverified"; arguments have {data} and {out} for places. `goal` is the speed-up to reach."""


def describe_emulated(emulated: Mapping[str, Any]) -> str:
    """The field `emulated` in words: "emulated 2 nodes of 4 ranks, 1000 Mbit/s, cyclic order"."""
    counts = emulated["ranks_per_node"]
    each = counts[0] if len(set(counts)) == 1 else "+".join(map(str, counts))
    ranks = f"{each} rank" if each == 1 else f"{each} ranks"
    parts = [f"emulated {emulated['nodes']} nodes of {ranks}"]
    if "gpus" in emulated:
        gpus = emulated["gpus"]
        parts.append(f"which share {gpus} GPU" if gpus == 1 else f"which share {gpus} GPUs")
    if emulated["link_mbit"] is not None:
        parts.append(f"{emulated['link_mbit']:g} Mbit/s")
    if emulated["flow_cap_mbit"] is not None:
        parts.append(f"{emulated['flow_cap_mbit']:g} Mbit/s a flow")
    if emulated["delay_ms"]:
        parts.append(f"{emulated['delay_ms']:g} ms each way")
    if emulated["order"] != "block":
        parts.append(f"{emulated['order']} order")
    if emulated.get("separate_processes"):
        parts.append("each arm in processes of its own")
    return ", ".join(parts)


def describe_rate(record: Mapping[str, Any], arm: str) -> str:
    """Return an arm's rate of training: "4,220 tokens/s", "6.7 images/s"; "" if it has none."""
    if arm not in record["arms"]:
        return ""
    rate = record["arms"][arm]["units_per_s"]
    return f"{rate:,.{0 if rate >= 10 else 1}f} {record['unit']}/s"


def claimed(record: Mapping[str, Any], speedup: str) -> str:
    """Return what is said of a speed-up: nothing if results are wrong or losses differ."""
    return "not claimed" if record["wrong"] else speedup
