"""Denies system calls to a job of two ranks, one after the other, stock and with deepytorch.

    python tests/faults/denied_calls.py [NAME ...]

As a container's seccomp profile does it, for each process and all that it starts. Prints a line
for each call; ends with status 1 where stock trains and ours does not.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from deepytorch_core.base import config

# Their numbers on x86-64 and on AArch64.
CALLS = {
    "memfd_create": (319, 279),
    "eventfd2": (290, 19),
    "getrandom": (318, 278),
    "pidfd_open": (434, 434),
    "sched_setaffinity": (203, 122),
    "sched_getaffinity": (204, 123),
    "prctl": (157, 167),
    "fallocate": (285, 47),
    "madvise": (28, 233),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "socketpair": (53, 199),
    "statx": (332, 291),
    "process_vm_readv": (310, 270),
    "get_mempolicy": (239, 236),
    "setpriority": (141, 140),
    "membarrier": (324, 283),
    "clock_nanosleep": (230, 115),
    "getcpu": (309, 168),
    "flock": (73, 32),
    "tgkill": (234, 131),
    "timer_create": (222, 107),
    "inotify_init1": (294, 26),
    "sysinfo": (99, 179),
    "mlock": (149, 228),
    "getrusage": (98, 165),
    "kill": (62, 129),
}
PROGRAM = """
import os, sys, torch, torch.distributed as dist
if sys.argv[1] == "ours":
    import deepytorch
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
numbers = torch.full((5000,), rank + 1.0)
dist.all_reduce(numbers)
gathered = [torch.empty(3) for _ in range(size)]
dist.all_gather(gathered, torch.full((3,), float(rank)))
if rank == 0:
    dist.send(torch.ones(2), 1)
else:
    dist.recv(torch.empty(2), 0)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(torch.ones(2, 64) * (rank + step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
print(f"trained {numbers.sum().item()} {loss.item():.5f}", flush=True)
dist.destroy_process_group()
"""
_LIMIT_S = 120


class _Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.POINTER(_Filter))]


def deny(name: str, error: int = errno.EPERM) -> None:
    """Have a system call of this process and its children fail from now on. Linux alone."""
    number = CALLS[name][0 if os.uname().machine == "x86_64" else 1]
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    allowed, failing = 0x7FFF0000, 0x00050000 | error
    filters = (_Filter * 4)(
        _Filter(load, 0, 0, 0),  # the call's number lies first
        _Filter(jump_if_equal, 0, 1, number),
        _Filter(give, 0, 0, failing),
        _Filter(give, 0, 0, allowed),
    )
    program = _Program(len(filters), filters)
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, with_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(
        seccomp, with_filter, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def run(arm: str, name: str | None, folder: Path) -> tuple[bool, str]:
    """Whether both ranks have trained, and the end of what the job said."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    mine = f"import runpy, sys; sys.argv[:] = {[str(script), arm]!r}; "
    if name is not None:
        here = str(Path(__file__).parent)
        mine = f"import sys; sys.path.insert(0, {here!r}); import denied_calls; " + (
            f"denied_calls.deny({name!r}); {mine}"
        )
    rank = folder / "rank.py"
    rank.write_text(f"{mine}runpy.run_path({str(script)!r}, run_name='__main__')\n")
    environment = config.child_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0", OMP_NUM_THREADS="1")
    try:
        done = subprocess.run(
            [*launcher, str(rank)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            cwd=folder,
        )
    except subprocess.TimeoutExpired:
        return False, f"not over after {_LIMIT_S} s"
    errors = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
    has_trained = done.returncode == 0 and done.stdout.count("trained") == 2
    return has_trained, "; ".join(errors[:2]) or done.stderr[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CALLS)}; default: all")
    names = parser.parse_args().names or list(CALLS)
    status = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            stock, _ = run("stock", name, Path(folder))
            ours, said = run("ours", name, Path(folder))
        is_worse = stock and not ours
        status |= is_worse
        print(
            f"{name}: stock {'trains' if stock else 'fails'}, ours "
            f"{'trains' if ours else 'fails'}{f': {said[:300]}' if is_worse else ''}",
            flush=True,
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
