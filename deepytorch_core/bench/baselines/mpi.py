"""Intel MPI from its Python package `impi-rt`, through mpi4py, on this machine's memory only.

Its mpiexec starts the ranks. Processes that joined later would be separate jobs to it, which do not
use shared memory with each other. Pinning is off, so both arms get the same cores.
"""

from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepytorch_core.base import config
from deepytorch_core.bench.job import BenchError
from deepytorch_core.bench.rivals import Bind, Call, Setup

if TYPE_CHECKING:
    from deepytorch_core.bench.job import CollectivesJob
    from deepytorch_core.bench.ops import Buffers, Collective

_PACKAGES = ("impi-rt", "mpi4py")
_SETTINGS = {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "off"}


def prepare() -> Setup:
    """Finds the packages; the record names every I_MPI variable the ranks see."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise BenchError(
                f"--baseline mpi needs the package {name}: pip install {' '.join(_PACKAGES)}"
            ) from None
    environment = config.child_environment(**_SETTINGS)
    settings = {name: value for name, value in environment.items() if name.startswith("I_MPI_")}
    return Setup(
        environment=_SETTINGS, settings=settings, versions=versions, mpiexec=_find_mpiexec()
    )


def connect(job: "CollectivesJob", rank: int) -> Bind:
    """The calls of this rank, on numpy views of the tensors."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BenchError(
            f"--baseline mpi: mpi4py can't load Intel MPI ({error}); both packages must be in the "
            f"same environment: pip install {' '.join(_PACKAGES)}"
        ) from error
    library = MPI.Get_library_version().strip()
    if "Intel" not in library:
        raise BenchError(
            f"--baseline mpi means Intel MPI, but mpi4py loaded {library.split(',')[0]}"
        )
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, job.world_size):
        raise BenchError(
            f"MPI calls rank {rank} of {job.world_size} rank {world.rank} of {world.size}"
        )

    def bind(op: "Collective", buffers: "Buffers") -> Call:
        return _bind(op.name, buffers.input.numpy(), buffers.output.numpy(), MPI)

    return bind


def _bind(op: str, source: Any, target: Any, mpi: Any) -> Call:
    world = mpi.COMM_WORLD
    match op:
        case "all_reduce":
            return lambda: world.Allreduce(mpi.IN_PLACE, source)
        case "all_gather":
            return lambda: world.Allgather(source, target)
        case "reduce_scatter":
            return lambda: world.Reduce_scatter_block(source, target)
        case "broadcast":
            return lambda: world.Bcast(source, root=0)
        case "all_to_all":
            return lambda: world.Alltoall(source, target)
        case "barrier":
            return lambda: world.Barrier()
        case _:
            raise ValueError(f"no MPI call for {op!r}")


def _find_mpiexec() -> Path:
    for file in metadata.files("impi-rt") or ():
        if file.name == "mpiexec.hydra":
            return Path(str(file.locate())).resolve()
    raise BenchError("the package impi-rt holds no mpiexec.hydra: pip install --force-reinstall it")
