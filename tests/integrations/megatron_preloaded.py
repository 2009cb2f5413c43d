"""Imported once for all ranks of the tests of Megatron: what they use of it, on the CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("megatron_on_cpu.py")))["install"]()

import megatron.core.dist_checkpointing  # noqa: E402
import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt.gpt_model  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel.schedules  # noqa: E402, F401
