"""A rank that measures NCCL's choices, in communicators of stock NCCL under the tuner plugin.

NCCL asks the plugin when a communicator is made. So each candidate gets a communicator of its own,
made while the plugin's table has that one choice for all sizes. It takes turns with one that was
made under an empty table, where NCCL chooses. NCCL keeps its own choice instead of a candidate that
it does not offer. So LL128 is measured where it is safe, whereas NCCL_PROTO could force it onto
links that tear its 128 bytes apart.

`deepytorch bench nccl` starts the ranks on one machine, emulated nodes included. On real nodes each
rank is started as any job's, and every node writes the table:

    DEEPYTORCH_ENABLED=0 torchrun --nnodes 2 ... -m deepytorch_core.bench.nccl_ranks
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from deepytorch_core.base import config
from deepytorch_core.bench import timing, worker
from deepytorch_core.bench.job import BenchError, parse_names, parse_sizes
from deepytorch_core.bench.nccl_choices import (
    CANDIDATES,
    DEFAULT_OPS,
    DEFAULT_SIZES,
    Bind,
    ChoicesJob,
    NcclCandidate,
    check_ops,
    lines,
    record,
    settle,
)
from deepytorch_core.bench.ops import Collective, make_buffers, share_of
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.network import nccl_table, prepare
from deepytorch_core.network.nccl_table import Entry

_DTYPE = torch.float32
_LIMIT_S = 120  # for ranks to come, and for a collective


class PluginCommunicators:
    """Communicators of stock NCCL under the tuner plugin, for all ranks of the default group.

    That group must not have been used yet, and `prepare_nccl` called with `table`.
    """

    def __init__(self, table: Path, device: torch.device) -> None:
        self._table, self._device = table, device
        group = dist.group.WORLD
        assert group is not None
        self.own = self._binding(group)

    @contextlib.contextmanager
    def choosing(self, candidate: NcclCandidate) -> Iterator[Bind]:
        """See `Communicators`. Collective over the default group."""
        choices = [
            Entry(
                collective=op,
                first_bytes=0,
                last_bytes=(1 << 62) - 1,
                algorithm=candidate.algorithm,
                protocol=candidate.protocol,
            )
            for op, algorithms in CANDIDATES.items()
            if candidate.algorithm in algorithms
        ]
        nccl_table.write(self._table, choices)
        group = dist.new_group(backend="nccl")
        try:
            yield self._binding(group)
        finally:
            torch.cuda.synchronize()
            dist.destroy_process_group(group)

    def _binding(self, group: dist.ProcessGroup) -> Bind:
        # Here NCCL makes the communicator and reads the table.
        dist.all_reduce(torch.ones(1, device=self._device), group=group)
        torch.cuda.synchronize()

        def bind(op: Collective, num_bytes: int) -> timing.Call:
            share = share_of(op, num_bytes, _DTYPE, group.size())
            buffers = make_buffers(op, share, _DTYPE, group.size(), self._allocate)
            self._check(op, buffers.input, buffers.output, group)
            return lambda: op.call(buffers.input, buffers.output, group)

        return bind

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(count, dtype=dtype, device=self._device)

    def _check(
        self, op: Collective, source: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        target.fill_(1.0)
        op.call(source, target, group)
        expected = float(group.size()) if op.reduces else 1.0
        if not bool((target == expected).all()):
            raise RuntimeError(f"{op.name} of ones on {group.size()} ranks is not {expected:g}")
        source.zero_()  # sums of sums would not stay numbers


def prepare_nccl(table: Path, store: Store, *, rank: int, size: int) -> None:
    """Have NCCL go by `table`, a file of this process's own, and else by what jobs here set.

    Raises BenchError where somebody has chosen by hand.
    """
    by_hand = sorted(nccl_table.BY_HAND & set(config.nccl_settings()))
    if by_hand:
        raise BenchError(f"{', '.join(by_hand)} chooses already: unset it to have that measured")
    nccl_table.write(table, [])
    config.set_for_nccl(
        {"NCCL_TUNER_PLUGIN": str(nccl_table.plugin()), "DEEPYTORCH_NCCL_TABLE": str(table)}
    )
    prepare.before_nccl(store, rank=rank, size=size)


@contextlib.contextmanager
def _own_table() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="deepytorch-nccl-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder) / nccl_table.FILE


def serve(job: ChoicesJob, rank: int, store: Store, emit: worker.Emit) -> None:
    """A rank of `bench nccl`; rank 0 gives what was found to `emit`."""
    cases = [(op, size) for op in job.ops for size in job.sizes]
    with _own_table() as table:
        prepare_nccl(table, PrefixStore("prepare", store), rank=rank, size=job.world_size)
        groups = worker.Groups.of_one(job, rank, PrefixStore("ranks", store), "nccl")
        communicators = PluginCommunicators(table, groups.device)
        found, chosen = settle(cases, communicators, groups.clock, groups.ranks)
    num_nodes = _num_nodes(PrefixStore("nodes", store), rank=rank, size=job.world_size)
    result = record(found, chosen, nodes=num_nodes, ranks=job.world_size)
    if rank == 0:
        emit({"record": result})


def _num_nodes(store: Store, *, rank: int, size: int) -> int:
    store.set(str(rank), prepare.node_name())
    return len(set(store.multi_get([str(other) for other in range(size)])))


def main(arguments: Sequence[str]) -> int:
    """A rank that torchrun started: measures with the others; each node writes its table."""
    parser = argparse.ArgumentParser(prog="python -m deepytorch_core.bench.nccl_ranks")
    parser.add_argument("--ops", default=",".join(DEFAULT_OPS))
    parser.add_argument("--sizes", default=DEFAULT_SIZES)
    parser.add_argument("--write", type=Path, help="default: in the cache folder")
    options = parser.parse_args(arguments)
    launched = config.launched()
    if launched is None or launched.local_rank is None:
        raise BenchError("start it with torchrun, or use deepytorch bench nccl")
    target: Path = options.write or config.cache_dir() / nccl_table.FILE
    ops = parse_names(options.ops)
    check_ops(ops)
    cases = [(op, size) for op in ops for size in parse_sizes(options.sizes)]
    device = torch.device("cuda", launched.local_rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=_LIMIT_S)
    with _own_table() as table:
        # Over a store of its own: torch's is made with the group.
        store, rank, size = next(rendezvous("env://", timeout=limit))
        prepare_nccl(table, PrefixStore("prepare", store), rank=rank, size=size)
        dist.init_process_group(
            "nccl", store=PrefixStore("ranks", store), rank=rank, world_size=size, timeout=limit
        )
        if c10d_patches.serving_name() != "nccl":
            raise BenchError("this is about NCCL alone: start it with DEEPYTORCH_ENABLED=0")
        ranks = worker.GroupAgreement(dist.new_group(backend="gloo", timeout=limit))
        communicators = PluginCommunicators(table, device)
        found, chosen = settle(cases, communicators, worker.cuda_clock, ranks)
    num_nodes = _num_nodes(PrefixStore("nodes", store), rank=rank, size=size)
    result = record(found, chosen, nodes=num_nodes, ranks=size)
    if launched.local_rank == 0:
        nccl_table.write(target, [Entry(**choice) for choice in result["choices"]])
    if rank == 0:
        for line in lines(result):
            sys.stdout.write(f"{line}\n")
        sys.stdout.write(f"written on every node: {target}\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    if "".join(sys.argv[1:2]).isdecimal():  # of `launch.run`, see `worker`
        worker.leave(worker.serve(sys.argv[1:], ChoicesJob, serve))
    try:
        sys.exit(main(sys.argv[1:]))
    except BenchError as refused:
        sys.exit(f"error: {refused}")
