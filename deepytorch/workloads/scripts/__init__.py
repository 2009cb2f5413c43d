"""List public training scripts that `deepytorch bench scripts` runs as they are.

The scripts are not here: they are read from checkouts. A row says where a script is from, how its
documentation calls it, and makes data and models of random weights for it, without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deepytorch.workloads.scripts import hugging_face, own_models, vision
from deepytorch.workloads.scripts.script import Script
from deepytorch_core.bench.job import BenchError

SCRIPTS: Mapping[str, Script] = {
    one.name: one for one in (*own_models.SCRIPTS, *hugging_face.SCRIPTS, *vision.SCRIPTS)
}
"""Maps names to rows."""


def chosen(
    names: Sequence[str], registry: Mapping[str, Script] | None = None
) -> tuple[Script, ...]:
    """Return the rows of these names, or all. Raises BenchError for an unknown name."""
    known = SCRIPTS if registry is None else registry
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(f"--only {unknown[0]}: expected {', '.join(known)}")
    return tuple(known[name] for name in names or known)
