# SPDX-License-Identifier: Apache-2.0
"""Writes what a run leaves in its folder besides the model: options, metrics, a model card.

Metrics go to ``metrics.jsonl`` and to the trackers that were asked for, which are those of
accelerate: TensorBoard, Weights & Biases, MLflow, Trackio, ...
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import yaml
from accelerate import tracking

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import console

_PROJECT = "deepytorch"


class RunLog:
    """Scalars of each step, in ``folder`` and by trackers; nothing where it is None (other ranks).

    ``options`` are the run's, for trackers that show them; ``arm`` is that of a comparison. Where
    the disk is full, a line says so, and the training goes on without scalars. Raises RecipeError
    for a tracker that can't start.
    """

    def __init__(
        self,
        folder: Path | None,
        trackers: Sequence[str] = ("tensorboard",),
        options: Mapping[str, Any] | None = None,
        *,
        arm: str = "",
    ) -> None:
        self._trackers: list[Any] = []
        self._file: TextIO | None = None
        if folder is None:
            return
        with self._or_without():
            for name in trackers:
                self._trackers.append(_tracker(name, folder, options or {}, arm))
            path = folder / (f"metrics-{arm}.jsonl" if arm else "metrics.jsonl")
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, **scalars: float) -> None:
        """Record each scalar under its keyword."""
        with self._or_without():
            if self._file is not None:
                finite = {
                    name: scalar if math.isfinite(scalar) else str(scalar)
                    for name, scalar in scalars.items()
                }
                self._file.write(json.dumps({"step": step, **finite}) + "\n")
            for tracker in self._trackers:
                tracker.log({f"train/{name}": value for name, value in scalars.items()}, step=step)

    def close(self) -> None:
        """Flush and close all."""
        with self._or_without():
            for tracker in self._trackers:
                tracker.finish()
            if self._file is not None:
                self._file.close()

    @contextmanager
    def _or_without(self) -> Iterator[None]:
        try:
            with _plainly(tracking):
                yield
        except OSError as error:
            self._trackers, self._file = [], None
            console.print(f"scalars     no more of them: {error}; training goes on")


@contextmanager
def _plainly(module: Any) -> Iterator[None]:
    """In here accelerate's trackers log as any other module.

    Their own logger wants accelerate's state, whose making sets threads, variables and a device.
    """
    before, module.logger = module.logger, logging.getLogger(module.__name__)
    try:
        yield
    finally:
        module.logger = before


def _tracker(name: str, folder: Path, options: Mapping[str, Any], arm: str) -> Any:
    known = {str(kind): logger for kind, logger in tracking.LOGGER_TYPE_TO_CLASS.items()}
    # One rank alone makes them, so none has to ask whether it is the first.
    tracker_class = type(name, (known[name],), {"main_process_only": False})
    where: list[Any] = [folder] if known[name].requires_logging_directory else []
    run_name = str(Path("tensorboard", arm)) if name == "tensorboard" else _PROJECT
    given: dict[str, Any] = {}
    if name == "wandb":  # in a run that is resumed the curves go on
        given = {"name": folder.name, "id": folder.name, "resume": "allow"}
        given |= {"dir": str(folder), "config": dict(options)}
    try:
        tracker = tracker_class(run_name, *where, **given)
        tracker.start()
        if options and name not in ("tensorboard", "wandb"):
            tracker.store_init_configuration(dict(options))
    except ImportError as error:
        raise RecipeError(f"trackers={name} needs it installed: pip install {name}") from error
    except OSError:
        raise
    except Exception as error:  # of the tracker's own: a server that is away, a missing login
        reason = " ".join(str(error).split())[:300]
        raise RecipeError(f"trackers={name} can't start: {reason}") from error
    return tracker


def write_options(run_dir: Path, recipe: str, options: Mapping[str, Any]) -> None:
    """``config.yaml``, with which the same run can be started again."""
    told = (
        f"# To start such a run again: deepytorch train {recipe} --config {run_dir}/config.yaml\n"
    )
    text = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True)
    (run_dir / "config.yaml").write_text(told + text, encoding="utf-8")


def write_card(run_dir: Path, recipe: str, options: Mapping[str, Any]) -> None:
    """A model card, ``README.md``, in the run's folder and beside each exported model."""
    from huggingface_hub import ModelCardData

    data, model = options.get("data"), options.get("model")
    exported = [name for name in ("checkpoint", "adapter", "merged") if (run_dir / name).is_dir()]
    facts = ModelCardData(
        base_model=model if _is_hub_id(model) else None,
        datasets=[str(data)] if _is_hub_id(data) else None,
        library_name="peft" if "adapter" in exported else None,
        tags=["deepytorch", recipe],
    )
    losses = _last_losses(run_dir / "metrics.jsonl")
    settings = yaml.safe_dump(dict(options), sort_keys=False, allow_unicode=True)
    card = (
        f"---\n{facts.to_yaml()}\n---\n\n# {options['name']}\n\n"
        f"Trained by deepytorch's recipe `{recipe}`"
        f"{f' from `{model}`' if model else ''}{f' on `{data}`' if data else ''}.\n\n"
        + "".join(f"* {what}: {value:.4f}\n" for what, value in losses.items())
        + f"\n## Options\n\n```yaml\n{settings}```\n"
    )
    for folder in (run_dir, *(run_dir / name for name in exported)):
        (folder / "README.md").write_text(card, encoding="utf-8")


def _is_hub_id(name: Any) -> bool:
    return isinstance(name, str) and not Path(name).exists() and name.count("/") == 1


def _last_losses(metrics: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    for line in lines:
        record = json.loads(line)
        for key, what in (("loss", "loss of the last step"), ("held_out_loss", "loss held out")):
            if isinstance(record.get(key), float):
                found[what] = record[key]
    return found
