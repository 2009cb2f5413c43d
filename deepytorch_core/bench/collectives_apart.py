"""One process of `bench collectives` whose arms are processes of their own, which take turns.

NCCL reads its settings once in a process. So what deepytorch sets for it can only be compared with
NCCL as it comes in another process. The first half of the processes is ours; each arm's default
group is its backend's, made as a job makes it. See `worker` for how a process is started.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from deepytorch_core.bench import timing, worker
from deepytorch_core.bench.collectives import OTHER, Bench
from deepytorch_core.bench.job import BenchError, CollectivesJob
from deepytorch_core.bench.rivals import TORCH_BACKENDS
from deepytorch_core.bench.rows import Row, RowMeasurement, cases, row_of
from deepytorch_core.bench.turns import Turns


@dataclass(frozen=True, kw_only=True)
class ApartJob(CollectivesJob):
    """`bench collectives` in two processes for each rank.

    `baseline_environment` are variables ("NAME=VALUE") of the baseline's processes alone.
    """

    WORKER: ClassVar[str] = "deepytorch_core.bench.collectives_apart"
    APART: ClassVar[bool] = True

    baseline_environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline not in TORCH_BACKENDS:
            raise BenchError(f"{self.baseline} shares its processes with ours: leave --nodes out")
        if self.cuda_graph:
            raise BenchError("--cuda-graph is for the GPUs of one machine: leave --nodes out")

    @property
    def num_processes(self) -> int:
        return 2 * self.world_size

    @property
    def baseline_settings(self) -> dict[str, str]:
        return dict(_pair(setting) for setting in self.baseline_environment)

    def environment(self, process: int, store_ports: Sequence[int]) -> dict[str, str]:
        """Return what torchrun would say of the rank, and that the second arm is stock."""
        arm, rank = divmod(process, self.world_size)
        seat = self.seats[rank]
        stock = {"DEEPYTORCH_ENABLED": "0", **self.baseline_settings}
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(seat.local_rank),
            "LOCAL_WORLD_SIZE": str(sum(other.node == seat.node for other in self.seats)),
            "GROUP_RANK": str(seat.node),
            **(stock if arm == timing.BASELINE else {}),
        }


def _pair(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition("=")
    return name, value


class ApartArm(Bench):
    """One arm on this rank; a row's other half comes over the store."""

    def __init__(self, job: ApartJob, process: int, store: Store) -> None:
        self.arm, rank = divmod(process, job.world_size)
        self._store = store
        self._turns = Turns(store, job)
        self._limit = timedelta(seconds=job.timeout_s)
        name = job.ours
        if self.arm == timing.BASELINE:
            name = job.baseline
            job = dataclasses.replace(job, registered=False)
        self._set_up(
            job, worker.Groups.of_one(job, rank, PrefixStore(f"arm{self.arm}", store), name)
        )

    def row(self, row: Row) -> dict[str, Any]:
        """This arm's part of a row, in its turns; the same on its ranks."""
        key = f"{row.op.name}/{row.num_bytes}/{row.dtype}"
        # One arm after the other: both at once would share cores and links.
        if self.arm == timing.BASELINE:
            self._turns.wait(f"{key}/check0")
        buffers = row.buffers(self.allocate_ours)
        call = self.bind_ours(row.op, buffers)
        before = self._calls(row.op)
        wrong = (
            self._check(
                row, buffers, call, algorithm=OTHER if self.arm == timing.BASELINE else None
            )
            if row.moves
            else self._check_barrier(call)
        )
        buffers.input.zero_()
        buffers.output.zero_()
        (probe,) = timing.probe([call], clock=self.groups.clock, ranks=self.ranks)
        self._put(f"{key}/probe{self.arm}", probe)
        self._turns.finished(f"{key}/check{self.arm}")
        probes = [self._get(f"{key}/probe{arm}") for arm in (timing.OURS, timing.BASELINE)]
        schedule = timing.plan(probes, iterations=self.job.iterations, budget_s=self.job.budget_s)
        blocks = self._follow(schedule, call, key)
        return {"blocks": blocks, "wrong": wrong, "algorithm": self._algorithm(row.op, before)}

    def share(self, row: Row, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Both arms' parts, on the first rank of ours; nothing elsewhere."""
        key = f"{row.op.name}/{row.num_bytes}/{row.dtype}"
        if self.groups.rank == 0:
            self._put(f"{key}/share{self.arm}", found)
            if self.arm == timing.OURS:
                return [found, self._get(f"{key}/share{timing.BASELINE}")]
        return []

    def _follow(self, schedule: timing.Schedule, call: timing.Call, key: str) -> list[list[float]]:
        """[block][repetition] in microseconds, the slowest rank's."""
        blocks = []
        for number, owner in enumerate(timing.block_order(schedule.num_pairs)):
            turn = f"{key}/{number}"
            if owner == self.arm:
                self.ranks.barrier()
                call()  # untimed: absorbs the change of turns
                blocks.append(self.groups.clock(call, schedule.repetitions[self.arm]))
                self._turns.finished(turn)
            self._turns.wait(turn)
        flat = self.ranks.maximum([time for block in blocks for time in block])
        slowest = iter(flat)
        return [[next(slowest) for _ in block] for block in blocks]

    def _put(self, key: str, value: Any) -> None:
        if self.groups.rank == 0:
            self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        self._store.wait([key], self._limit)
        return json.loads(self._store.get(key))


def measure(job: ApartJob, process: int, store: Store, emit: worker.Emit) -> None:
    """Runs the whole job on this process; rank 0 of ours gives each row to `emit`."""
    bench = ApartArm(job, process, store)
    for row in cases(job):
        shares = bench.share(row, bench.row(row))
        if shares:
            comparison = timing.compare([share["blocks"] for share in shares])
            wrong = (shares[0]["wrong"], shares[1]["wrong"])
            measured = RowMeasurement(comparison, wrong, (shares[0]["algorithm"], ""))
            emit({"record": row_of(job, row, measured)})


if __name__ == "__main__":
    worker.leave(worker.serve(sys.argv[1:], ApartJob, measure))
