"""One process of `bench ddp` with a vision model: a rank of one arm."""

from __future__ import annotations

import sys

from deepytorch.workloads.headline.ddp import VisionJob
from deepytorch.workloads.headline.worker import measure
from deepytorch_core.bench import worker

if __name__ == "__main__":
    worker.leave(worker.serve(sys.argv[1:], VisionJob, measure))
