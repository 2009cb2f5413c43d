"""The DDP benchmark: how long a training step of a vision model takes on more and more ranks.

    torchrun --nproc_per_node 8 -m deepytorch.examples.ddp_benchmark --model resnet50 \
        --precision amp

prints one line for a single rank without DDP, then one for 1, 2, 4 ... ranks with it:

    8 GPUs -- 1M/8G: p50: 0.073s 440/s p75: 0.074s 434/s p90: 0.074s 430/s p95: 0.075s 429/s

A time is that of the slowest rank's step, a rate one rank's samples per second. Data is random and
made once. deepytorch is active, as the module is part of it; with DEEPYTORCH_ENABLED=0 the same
command measures stock PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepytorch
from deepytorch.examples import vision_models
from deepytorch_core.base import config
from deepytorch_core.bench import percentiles

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

NUM_CLASSES = 1000
_SEED = 20


@dataclass(frozen=True)
class Arguments:
    """The checked values of the command line."""

    model: str
    precision: str
    batch_size: int
    steps: int
    warmup: int
    device: str
    image_size: int | None
    bucket_cap_mb: int | None


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark on this rank; returns the exit status."""
    given = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if given.model == "list":
            _say("\n".join(vision_models.names()))
            return 0
        network = vision_models.load(given.model, given.image_size)
    except vision_models.UnknownModelError as error:
        # Every rank finds the same, and one line says it.
        if config.rank() == 0:
            sys.stderr.write(f"error: {error}\n")
        return 2
    with _ranks(given) as device:
        _sweep(given, network, device)
    return 0


def parse(arguments: list[str]) -> Arguments:
    """The command line as `Arguments`; SystemExit for one that is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m deepytorch.examples.ddp_benchmark",
        description="Times training steps of a vision model on 1, 2, 4 ... ranks of torchrun.",
    )
    parser.add_argument(
        "--model",
        default="resnet50",
        help="a classifier of torchvision or timm; timm/NAME takes timm's where both have one; "
        "list prints all names",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "amp", "bf16", "fp16"),
        default="fp32",
        help="amp: autocast, with scaled gradients, to float16 on GPUs and to bfloat16 on CPUs; "
        "bf16, fp16: all of the model (default: %(default)s)",
    )
    parser.add_argument("--batch-size", type=_positive, default=32, help="samples of a rank")
    parser.add_argument("--steps", type=_positive, default=50, help="timed steps")
    parser.add_argument("--warmup", type=_positive, default=10, help="untimed steps before them")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--image-size", type=_positive, help="pixels of a side (default: what the model expects)"
    )
    parser.add_argument(
        "--bucket-cap-mb", type=_positive, help="size of a gradient bucket (default: DDP's own)"
    )
    return Arguments(**vars(parser.parse_args(arguments)))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


@contextlib.contextmanager
def _ranks(given: Arguments) -> Iterator[torch.device]:
    """The ranks of the launcher connected, if it started several; yields this rank's device."""
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if given.device == "cuda" or (given.device == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", config.local_rank())
        torch.cuda.set_device(device)
    if config.world_size() == 1:
        yield device
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _sweep(given: Arguments, network: vision_models.VisionModel, device: torch.device) -> None:
    import torch
    import torch.distributed as dist

    world_size, rank = config.world_size(), config.rank()
    if rank == 0:
        for line in _heading(given, network, device):
            _say(line)
        _say(_measured(given, network, device, size=1, what="no ddp", group=None))
    if world_size == 1:
        return
    here = config.local_world_size()
    for size in sizes(here, world_size):
        group = dist.group.WORLD if size == world_size else dist.new_group(list(range(size)))
        if rank < size:
            what = percentiles.layout(-(-size // here), min(size, here), device.type)
            line = _measured(given, network, device, size=size, what=what, group=group)
            if rank == 0:
                _say(line)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    if rank == 0:
        _say(str(deepytorch.report()).splitlines()[0])


def sizes(ranks_per_machine: int, world_size: int) -> list[int]:
    """Numbers of ranks to measure: 1, 2, 4 ... of one machine, all of it, then 2, 4 ... machines.

    The last is `world_size`.
    """
    found = []
    for unit, limit in ((1, ranks_per_machine), (ranks_per_machine, world_size)):
        size = unit
        while size < limit:
            found.append(size)
            size *= 2
    return sorted({*found, world_size})


def _heading(
    given: Arguments, network: vision_models.VisionModel, device: torch.device
) -> Iterator[str]:
    import torch
    import torch.distributed as dist

    backend = dist.get_backend() if dist.is_initialized() else "none"
    cuda = f", CUDA {torch.version.cuda}" if device.type == "cuda" else ""
    yield f"PyTorch {torch.__version__}{cuda}, backend {backend}"
    yield (
        f"{network.library} {network.name} in {given.precision}, batch size {given.batch_size}, "
        f"{network.image_size} x {network.image_size} pixels, {given.steps} steps"
    )


def _measured(
    given: Arguments,
    network: vision_models.VisionModel,
    device: torch.device,
    *,
    size: int,
    what: str,
    group: ProcessGroup | None,
) -> str:
    """Train on the ranks of `group` (without DDP if it is None); the line with their times."""
    import torch
    import torch.distributed as dist

    step = _training(given, network, device, group)
    times = _timed(step, device, given)
    if group is not None:
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        times = slowest.tolist()
    found = percentiles.percentiles(times)
    rates = {name: given.batch_size / (time_us * 1e-6) for name, time_us in found.items()}
    return percentiles.line(size, what, device=device.type, times_us=found, samples_per_s=rates)


def _timed(step: Callable[[], None], device: torch.device, given: Arguments) -> list[float]:
    """Microseconds of each step; on a GPU until its work is done."""
    import torch

    times = []
    for number in range(given.warmup + given.steps):
        start = time.perf_counter_ns()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= given.warmup:
            times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def _training(
    given: Arguments,
    network: vision_models.VisionModel,
    device: torch.device,
    group: ProcessGroup | None,
) -> Callable[[], None]:
    """A function that does one training step."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(_SEED)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(given.precision, torch.float32)
    model: Any = network.make(NUM_CLASSES).to(device, dtype).train()
    if group is not None:
        own = [device] if device.type == "cuda" else None
        model = DistributedDataParallel(
            model, device_ids=own, process_group=group, bucket_cap_mb=given.bucket_cap_mb
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=1e-4)
    torch.manual_seed(_SEED + config.rank())
    shape = (given.batch_size, 3, network.image_size, network.image_size)
    images = torch.randn(shape, device=device, dtype=dtype)
    labels = torch.randint(NUM_CLASSES, (given.batch_size,), device=device)
    amp = given.precision == "amp"
    autocast = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=amp and autocast == torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=autocast, enabled=amp):
            output = model(images)
            # Some models give what auxiliary classifiers say along with it.
            logits = getattr(output, "logits", output)
            loss: Any = torch.nn.functional.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
