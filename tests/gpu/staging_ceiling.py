"""Measures CPU-Reduce's ceiling on the host: copies both ways at once, with reducers running.

    python tests/gpu/staging_ceiling.py --gpus 4 --slot 1M --threads 4

Every process moves its GPU's data through a few pinned slots in both directions, without waiting
for anybody. Meanwhile its threads add up slots in shared memory. Printed: GB/s of each direction
over all GPUs, alone and together, without and with reducers, and the reducers' input GB/s.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import torch
import torch.multiprocessing as mp

DEPTH = 3
SECONDS = 1.5
# (copies up, copies down, reducers)
PHASES = {
    "device-to-host": (True, False, False),
    "host-to-device": (False, True, False),
    "both": (True, True, False),
    "both, reducing": (True, True, True),
    "reducing alone": (False, False, True),
}


def _copy(
    stream: torch.cuda.Stream,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    until: float,
) -> int:
    """Copies from slot to slot, some under way at a time; returns the bytes."""
    moved = 0
    events: list[torch.cuda.Event] = []
    with torch.cuda.stream(stream):
        while time.monotonic() < until:
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
                moved += source.numel() * source.element_size()
            event = torch.cuda.Event()
            event.record(stream)
            events.append(event)
            if len(events) > 4:
                events.pop(0).synchronize()
    stream.synchronize()
    return moved


def _reduce(slots: list[list[torch.Tensor]], share: slice, until: float) -> int:
    """Adds this thread's share of all ranks' slots, round and round; returns the bytes read."""
    moved = 0
    result = torch.empty_like(slots[0][0][share])
    while time.monotonic() < until:
        for depth in range(DEPTH):
            torch.add(slots[0][depth][share], slots[1 % len(slots)][depth][share], out=result)
            for rank in slots[2:]:
                result.add_(rank[depth][share])
            moved += len(slots) * result.numel() * result.element_size()
    return moved


def _run(rank: int, options: argparse.Namespace, shared: torch.Tensor, results: Any) -> None:
    torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    count = options.slot // 2
    # All ranks' slots, then the results'; pinned in every process, as CPU-Reduce has them.
    torch.cuda.check_error(
        torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), shared.nbytes, 0)
    )
    slots = [[shared[(r * DEPTH + d)] for d in range(DEPTH)] for r in range(options.gpus + 1)]
    device = torch.ones(DEPTH, count, dtype=torch.bfloat16, device="cuda")
    back = torch.empty_like(device)
    up = [(slots[rank][d], device[d]) for d in range(DEPTH)]
    down = [(back[d], slots[-1][d]) for d in range(DEPTH)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    workers = options.gpus * options.threads
    for phase, (copies_up, copies_down, reduces) in PHASES.items():
        results["barrier"].wait()
        until = time.monotonic() + SECONDS
        moved = {"up": 0, "down": 0, "reduced": 0}
        lock = threading.Lock()

        def note(
            what: str,
            run: Any,
            *arguments: Any,
            lock: threading.Lock = lock,
            moved: dict[str, int] = moved,
        ) -> None:
            torch.cuda.set_device(rank)
            found = run(*arguments)
            with lock:
                moved[what] += found

        tasks: list[tuple[Any, ...]] = []
        if copies_up:
            tasks.append(("up", _copy, streams[0], up, until))
        if copies_down:
            tasks.append(("down", _copy, streams[1], down, until))
        for worker in range(options.threads if reduces else 0):
            index = rank * options.threads + worker
            share = slice(count * index // workers, count * (index + 1) // workers)
            tasks.append(("reduced", _reduce, slots[: options.gpus], share, until))
        threads = [threading.Thread(target=note, args=task) for task in tasks]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - start
        results["queue"].put((phase, {name: each / seconds / 1e9 for name, each in moved.items()}))
    results["barrier"].wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--slot", default="1M", help="bytes, K and M allowed")
    parser.add_argument("--threads", type=int, default=4, help="reducers of each GPU's process")
    options = parser.parse_args()
    factor = {"K": 1 << 10, "M": 1 << 20}.get(options.slot[-1].upper(), 1)
    options.slot = int(options.slot.rstrip("kKmM")) * factor
    context = mp.get_context("spawn")
    shared = torch.zeros((options.gpus + 1) * DEPTH, options.slot // 2, dtype=torch.bfloat16)
    shared.share_memory_()
    results = {"queue": context.Queue(), "barrier": context.Barrier(options.gpus)}
    processes = [
        context.Process(target=_run, args=(rank, options, shared, results))
        for rank in range(options.gpus)
    ]
    for process in processes:
        process.start()
    sums = {phase: {"up": 0.0, "down": 0.0, "reduced": 0.0} for phase in PHASES}
    for _ in range(options.gpus * len(PHASES)):
        phase, found = results["queue"].get(timeout=120)
        for name, rate in found.items():
            sums[phase][name] += rate
    for process in processes:
        process.join()
    print(f"{options.gpus} GPUs, slots of {options.slot} bytes, {options.threads} threads each")
    for phase, rates in sums.items():
        print(
            f"{phase:16} up {rates['up']:6.1f} GB/s   down {rates['down']:6.1f} GB/s   "
            f"reduced from {rates['reduced']:6.1f} GB/s"
        )


if __name__ == "__main__":
    main()
