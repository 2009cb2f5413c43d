# SPDX-License-Identifier: Apache-2.0
"""The life of a run: start or resume, train, evaluate, save, end early when told, export."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from deepytorch.recipes.base.config import RecipeError, load_config, parse_arguments
from deepytorch.recipes.base.options import RunOptions
from deepytorch.recipes.base.quiet import quiet
from deepytorch.recipes.base.rank_consistency import draw_apart, refuse_unlike
from deepytorch.recipes.base.run import (
    Process,
    StepProgress,
    choose_device,
    console,
    distributed,
    make_run_dir,
    on_main,
    print_any_text,
    say_error,
    say_gone,
    stock_backend,
    together,
    wait_for_all,
)
from deepytorch.recipes.data.batches import BatchT, EndlessBatches
from deepytorch.recipes.runner import checkpoint, elastic, memory, rounding
from deepytorch.recipes.runner import compare as _compare
from deepytorch.recipes.runner.length import settle_device, settle_length
from deepytorch.recipes.runner.log import RunLog, write_card, write_options
from deepytorch.recipes.runner.signals import Endings
from deepytorch.recipes.runner.step_log import LoggedStep, Telling
from deepytorch.recipes.runner.task import Task
from deepytorch.recipes.runner.trainer import Trainer
from deepytorch_core.base import decisions
from deepytorch_core.c10d import patches as c10d_patches
from deepytorch_core.data.balance import WHAT

_NOT_COMPARED = ("backend", "save_every", "keep_checkpoints", "evaluate_every", "trackers")

ConfigT = TypeVar("ConfigT", bound=RunOptions)
Prepare = Callable[[ConfigT, Process], Task[Any]]


def run_recipe(
    recipe: str,
    config_class: type[ConfigT],
    prepare: Prepare[ConfigT],
    argv: Sequence[str] | None,
) -> int:
    """The main of every recipe, which gives its exit status.

    0 done, 1 --compare found a difference or another rank ended, 2 bad options or data, 130 Ctrl-C.
    """
    endings = Endings(recipe)
    with endings.of_ctrl_c():
        try:
            return _run_until_told(recipe, config_class, prepare, argv, endings)
        except KeyboardInterrupt:
            return endings.say_interrupted()


def _run_until_told(
    recipe: str,
    config_class: type[ConfigT],
    prepare: Prepare[ConfigT],
    argv: Sequence[str] | None,
    endings: Endings,
) -> int:
    default = Path(__file__).parents[1] / "configs" / f"{recipe}.yaml"
    arguments = parse_arguments(argv, recipe=recipe, default=default)
    print_any_text()
    quiet()
    try:
        config = load_config(config_class, arguments.config, arguments.overrides)
        device = choose_device(config.device)
        config.check_device(has_gpu=device.type == "cuda")
        if arguments.compare:
            config.check_compare()
        config = settle_device(config, device)
        # Neither arm of a comparison uses the default group: it only carries barriers and losses.
        stock = "gloo" if arguments.compare else stock_backend(device)
        backend = stock if arguments.compare or config.backend == "stock" else "deepytorch"
        with distributed(backend, device) as process:
            task = together(lambda: prepare(config, process), process)
            refuse_unlike(
                process,
                device=process.device.type,
                examples_of_an_epoch=task.batches.epoch_examples,
                batches_held_out=len(task.held_out),
                steps=config.steps or 0,
                epochs=str(config.epochs),
            )
            if arguments.dry_run:
                memory.print_estimate(task, config, process)
                return 0
            if arguments.compare:
                if process.is_main:
                    _say_left_out(config, load_config(config_class, default))
                return compare(recipe, task, config, process)
            return train(recipe, task, config, process, endings)
    except RecipeError as error:
        return say_error(recipe, error)
    except RuntimeError as error:  # of a backend
        return say_gone(recipe, error)


def train(
    recipe: str,
    task: Task[BatchT],
    config: RunOptions,
    process: Process,
    endings: Endings | None = None,
) -> int:
    """Train on ``config.backend``; save, export and show a sample."""
    endings = endings or Endings(recipe)
    path = written = None
    if config.resume is not None:
        path = checkpoint.find_on_all(str(config.resume), config, process)
        if path is None and process.is_main:
            console.print("resume=auto  no checkpoint yet: starting a new run")
    if path is not None:
        written = on_main(lambda: checkpoint.written(path), process)
        config = elastic.fit(config, written, process, path)
    config = settle_length(config, task.batches, process)
    if task.balanced is not None and config.backend == "deepytorch":
        task = replace(task, batches=task.balanced)
        task.batches.fit_steps(config.accumulation)
        _say_balance(task.batches, process)
    trainer = Trainer(task, config, process, ours=config.backend == "deepytorch")
    if task.before is not None:
        task.before(trainer)
    start, run_dir = 0, None
    if path is not None and written is not None:
        start = _resume(recipe, trainer, task, path, written)
        run_dir = checkpoint.run_of(path)
    previous = 0 if run_dir is None else start
    if run_dir is None:
        run_dir = on_main(lambda: make_run_dir(config.output_dir, config.name), process)
    course = _Course(recipe, trainer, task, run_dir, previous=previous)
    log = _open_log(recipe, config, run_dir, process)
    meter = _Meter(task.unit, trainer.flops_per_unit, process)
    telling = Telling(process)

    def report(steps: Iterator[LoggedStep]) -> bool:
        """Show and record them; whether any rank was told to end."""
        end = False
        for logged in steps:
            meter.add(logged.num_units, logged.seconds)
            rate = logged.learning_rate
            progress.update(logged.step, f"loss {logged.loss:.4f}  lr {rate:.2e}  {meter.text()}")
            log.write(logged.step, loss=logged.loss, learning_rate=rate, **meter.scalars())
            end = end or logged.end
        return end

    # To the very end: what is told after the last step only has to leave the export its time.
    with endings.noted():
        with StepProgress(config.total_steps, enabled=process.is_main) as progress:
            for step in range(start + 1, config.total_steps + 1):
                telling.begin()
                result = trainer.step([next(task.batches) for _ in range(config.accumulation)])
                telling.add(step, result, end=endings.asked)
                is_evaluated = bool(
                    task.held_out and config.evaluate_every and step % config.evaluate_every == 0
                )
                # The last one too: what is exported may not fit on the disk.
                is_last = step == config.total_steps
                due = bool(config.save_every and (step % config.save_every == 0 or is_last))
                end = report(telling.read(everything=due or is_evaluated or is_last))
                if is_evaluated:
                    log.write(step, held_out_loss=trainer.evaluate(task.held_out))
                if due or end:
                    report(telling.read(everything=True))  # what is saved has its losses recorded
                    problem = course.save(step)
                    if end:
                        log.close()
                        _ended_early(problem, run_dir, step, process)
                        return endings.status
                    if problem is not None and process.is_main:
                        console.print(f"step {step}: no checkpoint: {problem}; training goes on")
        endings.promise = "the last step is done, and the model is still written"
        if task.held_out:
            held_out = trainer.evaluate(task.held_out)
            log.write(config.total_steps, held_out_loss=held_out)
            if process.is_main:
                console.print(f"held out    loss {held_out:.4f} on data left out of training")
        log.close()
        try:
            finish(recipe, task, trainer, run_dir, process)
        except RecipeError as error:
            raise RecipeError(
                f"{error}. {course.rescue(max(start, config.total_steps))}"
            ) from error
    return 0


def finish(
    recipe: str, task: Task[BatchT], trainer: Trainer[BatchT], run_dir: Path, process: Process
) -> None:
    """Export the model and show a sample, on rank 0; RecipeError on all if that fails."""
    weights = trainer.engine.full_state() if trainer.engine.sharded else None

    def export() -> None:
        model: Any = trainer.model
        if weights is not None:
            model = task.make_model()
            model.load_state_dict(weights, strict=False)
            if memory.has_room_for(model, process.device):
                model.to(process.device)
        try:
            task.export(model, run_dir)
            write_card(run_dir, recipe, asdict(trainer.options))
        except (OSError, RuntimeError, SafetensorError) as error:
            # A full disk is one or the other, depending on who writes.
            reason = " ".join(str(error).split())
            raise RecipeError(f"cannot write the trained model to {run_dir}: {reason}") from error

    on_main(export, process)
    if process.is_main:
        console.print(f"scalars     {run_dir / 'tensorboard'}", highlight=False)
    wait_for_all(process)  # the others wait for the sample before the group goes away


def compare(recipe: str, task: Task[BatchT], config: RunOptions, process: Process) -> int:
    """Train the stock stack and deepytorch, step by step in turn, and print the differences."""
    config = settle_length(config, task.batches, process)
    stock_group = dist.new_group(backend=stock_backend(process.device), group_desc="stock arm")
    our_group = dist.new_group(backend="deepytorch", group_desc="deepytorch arm")
    trainers = {
        "stock": Trainer(task, config, process, group=stock_group, ours=False),
        "ours": Trainer(task, config, process, group=our_group),
    }
    if config.rounding_arm:
        # A group of its own: DDP's buckets of two models may come in any order.
        group = dist.new_group(backend=stock_backend(process.device), group_desc="stock again")
        make_model = rounding.nudged(task.make_model, config.seed)
        again = replace(task, make_model=make_model)
        trainers[rounding.ARM] = Trainer(again, config, process, group=group, ours=False)
    if task.before is not None:
        task.before(trainers["stock"])
    by_chance = task.repacked and rounding.drops_out(trainers["stock"].model)
    if by_chance and not config.rounding_arm:
        raise RecipeError(
            "dropout draws other numbers for rows without padding, so the arms' losses differ by "
            "chance: train without dropout or with padding_free=off, or use rounding_arm=true, "
            "which shows how far chance drives two stock runs apart"
        )
    run_dir = on_main(lambda: make_run_dir(config.output_dir, config.name), process)
    logs = {arm: RunLog(run_dir if process.is_main else None, arm=arm) for arm in trainers}
    comparison = _compare.Comparison(
        backends={
            arm: c10d_patches.serving_name(trainer.group) for arm, trainer in trainers.items()
        },
        unit=task.unit,
        draws_others=by_chance,
    )
    own = task.batches if task.balanced is None else task.balanced
    _say_balance(own, process)
    with StepProgress(config.total_steps, enabled=process.is_main) as progress:
        for step in range(1, config.total_steps + 1):
            taken = {
                batches: [next(batches) for _ in range(config.accumulation)]
                for batches in dict.fromkeys((task.batches, own))
            }
            # Arms compared in losses alone come last, so before each of the two in turn.
            others = trainers.keys() - _compare.ARMS
            for arm in (*_compare.order_of(step), *others):
                # The same numbers for all arms, as dropout's; where they can't be the same, others.
                other = config.total_steps if by_chance and arm == rounding.ARM else 0
                draw_apart(config.seed + step + other, process)
                with _compare.timed(process.device) as timer:
                    result = trainers[arm].step(taken[own if arm == "ours" else task.batches])
                loss = result.loss_share.cpu()
                dist.all_reduce(loss)
                comparison.add(arm, loss.item(), timer.seconds, int(result.num_units.item()))
                logs[arm].write(step, **comparison.last(arm))
            progress.update(step, comparison.progress_text())
    for log in logs.values():
        log.close()
    finish(recipe, task, trainers["ours"], run_dir, process)
    verdict = comparison.verdict(config.total_tolerance)
    options = asdict(config)
    on_main(lambda: _compare.write_results(recipe, comparison, run_dir, options, process), process)
    if process.is_main:
        _compare.print_table(comparison, run_dir, config.total_tolerance)
        if verdict is not None:
            sys.stderr.write(f"{recipe}: {verdict}\n")
    dist.barrier()
    return 0 if verdict is None else 1


def _say_left_out(config: RunOptions, usual: RunOptions) -> None:
    """Name the settings, where they are not the recipe's own, that a comparison has no use for."""
    given = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name in _NOT_COMPARED
        if (value := getattr(config, name)) != getattr(usual, name)
    ]
    if given:
        console.print(
            f"left out    {', '.join(given)}: a comparison trains both backends, without "
            "checkpoints or evaluations, and records TensorBoard's scalars",
            highlight=False,
        )


def _say_balance(batches: EndlessBatches[Any], process: Process) -> None:
    imbalance = batches.imbalance()
    if imbalance is None:
        return
    decisions.record(WHAT, "on", str(imbalance))
    if process.is_main:
        console.print(f"balance     {imbalance}", highlight=False)


def _open_log(recipe: str, config: RunOptions, run_dir: Path, process: Process) -> RunLog:
    opened: list[RunLog] = []
    options = asdict(config)

    def open_it() -> None:
        write_options(run_dir, recipe, options)
        opened.append(RunLog(run_dir, config.tracker_names, options))

    on_main(open_it, process)
    return opened[0] if opened else RunLog(None)


class _Course:
    """Saves the course of a training as checkpoints; each goes on from the ``previous`` one."""

    def __init__(
        self, recipe: str, trainer: Trainer[Any], task: Task[Any], run_dir: Path, *, previous: int
    ) -> None:
        self._recipe, self._trainer, self._task = recipe, trainer, task
        self._run_dir, self._previous = run_dir, previous

    def save(self, step: int) -> str | None:
        """Write a checkpoint; None, or why it could not be written. Collective."""
        trainer, batches = self._trainer, self._task.batches
        process, config = trainer.process, trainer.options
        state = {
            "step": step,
            "position": batches.position,
            "epoch_examples": batches.epoch_examples,
            "examples": batches.fingerprint,
            "random": checkpoint.random_state(process.device),
        }
        problem = checkpoint.save(
            trainer.engine,
            state,
            self._run_dir / checkpoint.FOLDER,
            process,
            keep=config.keep_checkpoints,
            facts={"recipe": self._recipe, "engine": config.engine},
            written=checkpoint.Written(process.world_size, config.batch_size, config.accumulation),
            previous=self._previous,
        )
        if problem is None:
            self._previous = step
        return problem

    def rescue(self, step: int) -> str:
        """How to go on where the model could not be exported after ``step``. Collective."""
        problem = None if self._previous == step else self.save(step)
        if problem is None:
            return f"It is kept as a checkpoint: mend that, then resume={self._run_dir} exports it"
        if self._previous:
            return f"Mend that, then resume={self._run_dir} goes on after step {self._previous}"
        return f"It is lost, since there is no checkpoint either ({problem}): use save_every"


def _resume(
    recipe: str,
    trainer: Trainer[BatchT],
    task: Task[BatchT],
    path: Path,
    written: checkpoint.Written,
) -> int:
    process = trainer.process
    facts = {"recipe": recipe, "engine": trainer.options.engine}
    state = checkpoint.load(trainer.engine, path, process, facts=facts)
    trainer.go_on_after(int(state["step"]))
    told = f"resumed     {path}, after step {state['step']}"
    together(lambda: elastic.go_on(task.batches, state, written, trainer.options, process), process)
    if written.world_size != process.world_size:
        told += (
            f", of {written.world_size} processes: now {process.world_size} with "
            f"accumulation={trainer.options.accumulation}, so each step has as many examples"
        )
    examples = state.get("examples"), task.batches.fingerprint
    if None not in examples and examples[0] != examples[1]:
        told += (
            "\ndata        other examples than the checkpoint was trained on, with which it goes on"
        )
    if process.is_main:
        console.print(told, highlight=False)
    return int(state["step"])


def _ended_early(problem: str | None, run_dir: Path, step: int, process: Process) -> None:
    if problem is not None:
        raise RecipeError(f"told to end after step {step}, but no checkpoint: {problem}")
    if process.is_main:
        console.print(f"ended       after step {step}, as told; go on with resume={run_dir}")
    wait_for_all(process)


class _Meter:
    """Speed, memory and utilisation of the latest step."""

    def __init__(self, unit: str, flops_per_unit: float, process: Process) -> None:
        self._unit, self._flops, self._process = unit, flops_per_unit, process
        self._num_units, self._seconds = 0.0, 1.0

    def add(self, num_units: float, seconds: float) -> None:
        self._num_units, self._seconds = num_units, seconds

    def scalars(self) -> dict[str, float]:
        """Return the scalars that RunLog takes."""
        rate = self._num_units / self._seconds
        found = {f"{self._unit}_per_s": rate, "step_time_s": self._seconds}
        found["memory_gb"] = memory.used_gb(self._process.device)
        peak = memory.peak_flops(self._process.device)
        if peak and self._flops:
            found["mfu"] = rate * self._flops / (peak * self._process.world_size)
        return found

    def text(self) -> str:
        """For the progress line."""
        found = self.scalars()
        mfu = f"  MFU {found['mfu']:.0%}" if "mfu" in found else ""
        rate = found[f"{self._unit}_per_s"]
        return f"{rate:,.0f} {self._unit}/s{mfu}  {found['memory_gb']:.1f} GB"
