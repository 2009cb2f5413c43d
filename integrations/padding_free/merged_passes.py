"""Micro-batches of one optimizer step share passes of the model's trunk.

A Trainer that accumulates gradients fetches all micro-batches of a step before it runs the first.
So does Accelerate's loader where it is asked to (`accumulated_batches`). Packed, the micro-batches
are one row of tokens, on which the trunk below a language model's head runs once. Each
micro-batch's own pass gets its part of the result. Its head, loss, metrics and backward pass stay
its own, and end at that part. The last backward pass brings the gradients of all parts to the
trunk, so DistributedDataParallel adds up what it would have added up.

First it is watched whether each micro-batch calls the model once, with the tensors that the loader
has made. Later on a pass may be one that was not expected, or ask its trunk for something else. It
runs as it is, and so do those after it. Gradients of parts that were handed out then go to the
trunk at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from deepytorch_core import guard
from deepytorch_core.base import config, console, decisions
from deepytorch_core.compile import graphs, module_state, seam

from .keys import BATCH_KEY
from .pass_budget import WHAT, Fixed, StepTokens, measured

if TYPE_CHECKING:
    from deepytorch_core.data import Packing

# A trunk's arguments that are made of the batch.
_OF_BATCH = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
_STEPS = ("transformers.trainer", "trl.trainer.sft_trainer")
_ALONE_OR_DDP = ("NO", "MULTI_CPU", "MULTI_GPU")
# These hooks on gradients of parameters wait for the last micro-batch, as passes do.
_PATIENT_HOOKS = "deepspeed.runtime.zero.stage_1_and_2"
# DeepSpeed's ZeRO up to this stage adds gradients up over ranks in the step's last backward pass.
# Later ones communicate in each pass, and every rank would need as many.
_MOST_STAGE = 1
# Steps that are watched before passes are shared.
WATCHED_STEPS = 2
_NONE = StepTokens(0, 0, 0)
_PLAIN = (type(None), bool, int, float, str)

_Batch = Mapping[str, Any]


class Packer(Protocol):
    """Packs a model's batches, and keeps whether its micro-batches share passes."""

    merged: MergedPasses | None
    is_apart: bool

    @property
    def model(self) -> Any:
        """Packed batches go into it."""
        ...

    def planned(self, call: dict[str, Any], planned: Packing | None) -> Packing | None:
        """How a batch that is to come packs; None where it stays padded."""
        ...

    def pack(
        self, call: dict[str, Any], packing: Packing, *, is_filled: bool = True
    ) -> dict[str, Any]:
        """The arguments for one packed row in place of those for a padded batch."""
        ...

    def joined(self, rows: Sequence[dict[str, Any]], packings: Sequence[Packing]) -> dict[str, Any]:
        """The arguments for one row of several."""
        ...


def expect(
    forward: Packer | None, batches: Sequence[Any], why_not: Callable[[], str | None]
) -> None:
    """Have the next micro-batches share passes, where that is the same.

    Args:
        forward: packs the batches of the model; None: nothing does.
        batches: all of a step.
        why_not: says why those of this loop keep passes of their own, if they do.
    """
    if forward is None or len(batches) < 2:
        return
    if forward.merged is None and not forward.is_apart:
        budget = _budget(forward.model)
        if budget is None:
            return
        reason = why_not() or _why_not_trunk(forward.model)
        forward.is_apart = reason is not None
        name = type(forward.model).__name__
        if reason is not None or budget.tokens:
            decisions.record(
                WHAT,
                "apart" if reason else "merged",
                f"{name}: {reason or 'they share passes of its trunk'}",
            )
        if reason is None:
            forward.merged = MergedPasses(forward.model, budget)
    if forward.merged is not None:
        forward.merged.expect(batches)


def _budget(model: Any) -> Fixed | None:
    """The tokens of passes that are shared; None where a processor gains nothing by it."""
    asked = config.current().tokens_per_step
    if isinstance(asked, int):
        return Fixed(asked)
    device = next(model.parameters()).device
    return measured(model, device) if asked == "auto" and device.type == "cuda" else None


def why_not_in(accelerator: Any) -> str | None:
    """Why micro-batches keep passes of their own under this Accelerator."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind == "DEEPSPEED":
        return _why_not_under(accelerator.state.deepspeed_plugin)
    if kind not in _ALONE_OR_DDP:
        return f"{kind} communicates in each pass, and ranks may need different numbers of them"
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        return "gradients are added up over ranks for each micro-batch"
    return None


def _why_not_under(plugin: Any) -> str | None:
    if plugin.zero_stage > _MOST_STAGE:
        return (
            f"ZeRO-{plugin.zero_stage} communicates in each pass, and ranks may need different "
            "numbers of them"
        )
    if (
        plugin.hf_ds_config.get_value("zero_optimization.offload_optimizer.device", "none")
        != "none"
    ):
        return "DeepSpeed adds up each micro-batch's gradients in the host's memory"
    return None


def why_not_of(trainer: Any) -> str | None:
    """Why micro-batches of this transformers Trainer keep passes of their own."""
    step = type(trainer).training_step
    if step.__module__ not in _STEPS:
        return f"its training step is that of {step.__module__}"
    problem = why_not_in(trainer.accelerator)
    if problem is not None:
        return problem
    for callback in trainer.callback_handler.callbacks:
        function = type(callback).on_substep_end
        if function.__module__.partition(".")[0] not in ("transformers", "trl", "deepytorch"):
            return f"{type(callback).__name__} looks on between micro-batches"
    return None


def _why_not_trunk(model: Any) -> str | None:
    trunk = getattr(model, "base_model", model)
    if trunk is model:
        return "there is no trunk below its head"
    for field in ("hidden_states", "attentions", "router_logits"):
        if getattr(model.config, f"output_{field}", False):
            return f"its configuration asks for {field}"
    hooked = module_state.hooked(trunk, is_replayed=True)
    if hooked is not None:
        return f"there are hooks on {hooked}"
    if any(
        isinstance(module, _NormBase) and module.track_running_stats for module in trunk.modules()
    ):
        return "it has statistics of batches"
    if any(
        not _is_patient(hook)
        for parameter in trunk.parameters()
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        for hook in (hooks or {}).values()
    ):
        return "there are hooks on its parameters' gradients"
    if seam.opened(trunk) is None:
        return "its trunk is compiled by the script"
    return None


def _is_patient(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")) == _PATIENT_HOOKS


class MergedPasses:
    """Makes the passes of one model's trunk.

    Args:
        model: the transformers model above the trunk, `model.base_model`.
        budget: of tokens that one pass has at most, unless a micro-batch has more by itself.
    """

    def __init__(self, model: Any, budget: Fixed) -> None:
        self.num_tokens = 0
        """Tokens of the pass under way, without those that fill it up."""
        self.num_shared = 0
        """How many passes were made for several micro-batches."""
        self._budget = budget
        self._coming: Sequence[_Batch] = ()
        self._versions: list[list[int]] = []  # of their tensors, as the loader has made them
        self._next = 0
        self._group: _Group | None = None
        self._is_due = False  # whether the trunk's next call is that of the micro-batch
        self._num_alike = 0  # steps in a row whose micro-batches called the model once each
        self._is_strange = False  # whether the step under way has had another call
        self.is_over = False
        """Whether it is known that passes can't be shared, or that it doesn't pay."""
        self._tokens = _NONE  # of the step under way
        self._name = type(model).__name__
        found = seam.opened(model.base_model)
        assert found is not None
        found.around = self._around

    def expect(self, batches: Sequence[Any]) -> None:
        """These are the micro-batches of the step that begins."""
        was_alike = not self._is_strange and self._next == len(self._coming)
        self._num_alike = self._num_alike + 1 if was_alike and self._coming else 0
        if not self.is_over and self._num_alike >= WATCHED_STEPS:
            self._weigh(self._tokens if was_alike else None)
        self._tokens = _NONE
        self._abandon()
        self._coming, self._next = list(batches), 0
        self._versions = [_versions(batch) for batch in self._coming]
        self._is_strange = False

    def _weigh(self, step: StepTokens | None) -> None:
        """Tell the budget of the last step, and the report what it makes of it."""
        budget, had_times = self._budget, self._budget.times_ms is not None
        budget.note(step)
        if budget.problem is not None:
            self.stop(f"{self._name}: {budget.problem}", budget.times_ms)
        elif budget.times_ms is not None and not had_times:
            found = "in which a thousand take" if budget.times_ms else "from the profile"
            why = f"{self._name}: {budget.tokens} tokens of a pass, {found}"
            decisions.record(WHAT, "merged", why, times_ms=budget.times_ms)

    @property
    def is_open(self) -> bool:
        """Whether it is still found out if micro-batches share passes."""
        return not (self.is_over or self._budget.is_settled)

    def enter(
        self, forward: Packer, call: dict[str, Any], packing: Packing
    ) -> dict[str, Any] | None:
        """The arguments of a micro-batch that shares a pass; None where it has its own.

        Args:
            forward: packs the model's batches.
            call: the padded call's arguments, by name.
            packing: how its tokens lie.
        """
        number, self._is_due = self._next, False
        is_again = torch._C._current_graph_task_id() != -1
        if is_again or not torch.is_grad_enabled() or self._is_strange:
            return None
        if number >= len(self._coming) or not self._is_expected(call, number):
            self._abandon()
            return None
        self._next += 1
        self._count(packing.num_tokens, packing.num_tokens)
        if self.is_over or self._num_alike < WATCHED_STEPS:
            return None
        if self._group is None or number >= self._group.end:
            self._group = self._begun(forward, number, packing)
        group = self._group
        if group is None:
            return None
        self._is_due = True
        self.num_tokens = group.num_tokens
        self._count(0, group.num_tokens)
        group.enter(number, forward.pack(call, packing, is_filled=False))
        return group.row

    def _count(self, num_tokens: int, of_pass: int) -> None:
        tokens = self._tokens
        self._tokens = StepTokens(
            tokens.num_tokens + num_tokens,
            max(tokens.most_tokens, num_tokens),
            max(tokens.most_of_pass, of_pass),
        )

    def _is_expected(self, call: Mapping[str, Any], number: int) -> bool:
        batch = self._coming[number]
        return _is_of(call, batch) and self._versions[number] == _versions(batch)

    def meet_other(self) -> None:
        """A pass of the model that shares nothing begins."""
        is_again = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and not is_again:
            self._abandon()

    @property
    def is_within(self) -> bool:
        """Whether the next pass is a part of the one that was made."""
        return self._group is not None and self._next < self._group.end

    def leave(self) -> None:
        """The micro-batch's pass is over."""
        self._is_due = False

    def _begun(self, forward: Packer, first: int, packing: Packing) -> _Group | None:
        packings, total = [packing], packing.num_tokens
        if total >= self._budget.tokens:
            return None
        for batch in self._coming[first + 1 :]:
            planned = _planned(forward, batch)
            if planned is None or total + planned.num_tokens > self._budget.tokens:
                break
            packings.append(planned)
            total += planned.num_tokens
        if len(packings) == 1:
            return None
        several = self._coming[first : first + len(packings)]
        rows = [
            forward.pack(_of_batch(batch), plan, is_filled=False)
            for batch, plan in zip(several, packings, strict=True)
        ]
        return _Group(first, rows, forward.joined(rows, packings), total)

    def _around(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        group, is_due = self._group, self._is_due
        self._is_due = False
        if group is None or not is_due:
            return call(*args, **kwargs)
        problem = group.problem(args, kwargs)
        if problem is None and group.output is None:
            given = [group.swapped("", argument) for argument in args]
            named = {name: group.swapped(name, argument) for name, argument in kwargs.items()}
            before, is_lacking = guard.random_numbers(), False
            try:
                problem = group.take(call(*given, **named))
            except torch.OutOfMemoryError:
                is_lacking = True  # the error's frames hold what the pass has made
            if is_lacking:
                self._lack(before)
                return call(*args, **kwargs)
            self.num_shared += problem is None
        if problem is not None:
            self.stop(problem)
            return call(*args, **kwargs)
        return group.part()

    def _lack(self, before: Any) -> None:
        """Let the micro-batch have its own pass: there is no memory for that of several.

        `before`: the random numbers as they were.
        """
        self._budget.lacked(self.num_tokens)
        self._abandon()
        torch.cuda.empty_cache()
        graphs.rewind(before)
        console.say(
            f"tokens_per_step: there is no memory for a pass of {self.num_tokens} tokens: passes "
            f"have {self._budget.tokens} at most from now on",
            level="warning",
        )

    def stop(self, problem: str, times_ms: dict[str, float] | None = None) -> None:
        """Let micro-batches have passes of their own from now on, this one's rest included."""
        decisions.record(WHAT, "apart", problem, times_ms=times_ms)
        self.is_over = True
        self._abandon()

    def _abandon(self) -> None:
        """Let the rest of the step's micro-batches have passes of their own."""
        self._is_strange = True
        if self._group is not None:
            self._group.abandon()
            self._group = None


class _Group:
    """Micro-batches whose tokens go through the trunk together.

    Args:
        first: its first one's number in the step.
        rows: packed arguments of each, not filled up.
        joint: those of all.
        num_tokens: of all.
    """

    def __init__(
        self, first: int, rows: list[dict[str, Any]], joint: dict[str, Any], num_tokens: int
    ) -> None:
        self.end = first + len(rows)
        self.num_tokens = num_tokens
        self.output: Any = None
        self.row: dict[str, Any] = {}
        self._first = first
        self._joint = joint
        self._others: tuple[Any, ...] | None = None
        self._number = 0
        self._parts = _Parts([row["input_ids"].shape[1] for row in rows])

    def enter(self, number: int, row: dict[str, Any]) -> None:
        """The pass of micro-batch `number` begins, with the packed arguments `row`."""
        self._number = number - self._first
        self.row = row

    def problem(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Why the trunk's call can't be answered: it has other arguments than the first one's."""
        known = {id(argument) for argument in self.row.values() if isinstance(argument, Tensor)}
        others = []
        for name, value in (*(("", argument) for argument in args), *kwargs.items()):
            is_batch = name in self._joint or id(value) in known
            if is_batch and (not isinstance(value, Tensor) or id(value) in known):
                continue
            if isinstance(value, Tensor) and (name != "num_items_in_batch" or value.dim()):
                return f"its trunk is called with {name or 'a tensor'} of its own"
            if not isinstance(value, (*_PLAIN, Tensor)):
                return f"its trunk is called with a {type(value).__name__}"
            others.append((name, None if isinstance(value, Tensor) else value))
        if self._others is None:
            self._others = tuple(others)
        return None if self._others == tuple(others) else "calls of its trunk differ"

    def swapped(self, name: str, value: Any) -> Any:
        """The argument of all in place of the one that the micro-batch would have."""
        if name in self._joint:
            return self._joint[name]
        names = [
            key for key, argument in self.row.items() if argument is value and key in self._joint
        ]
        return self._joint[names[0]] if isinstance(value, Tensor) and names else value

    def take(self, output: Any) -> str | None:
        """Keep what the trunk has returned; returns why it has no parts, if it has none."""
        given = {} if not isinstance(output, Mapping) else output
        there = [name for name, value in given.items() if value is not None]
        if there != ["last_hidden_state"]:
            return f"its trunk returns {', '.join(there) or type(output).__name__}"
        self.output = output
        self._parts.hidden = output["last_hidden_state"]
        return None

    def abandon(self) -> None:
        """No more parts are taken."""
        if self.output is not None:
            self._parts.abandon()

    def part(self) -> Any:
        """Return what the trunk would have returned for the micro-batch."""
        return type(self.output)(last_hidden_state=self._parts.take(self._number))


class _Parts:
    """A hidden state [1, tokens, width] that is handed out in parts, and their gradients."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.hidden: Any = None
        self._ends = [0, *itertools.accumulate(lengths)]
        self._taken: list[Tensor | None] = [None] * len(lengths)

    def take(self, number: int) -> Tensor:
        """The part of a micro-batch; the last one's leads to the trunk."""
        hidden: Tensor = self.hidden
        begin, end = self._ends[number : number + 2]
        if number == len(self._taken) - 1:
            apply: Any = _Last.apply
            self.hidden = None  # it goes with its graph
            last: Tensor = apply(hidden, self, begin, end)
            return last
        leaf = hidden.detach()[:, begin:end].requires_grad_(hidden.requires_grad)
        self._taken[number] = leaf
        return leaf.clone()  # a head may work in place

    def gradient(self, last: Tensor, like: torch.Size) -> Tensor:
        """Return the gradient of the whole hidden state, once the last part's is known."""
        found = last.new_zeros(like)
        for number, leaf in enumerate(self._taken):
            if leaf is not None and leaf.grad is not None:
                found[:, self._ends[number] : self._ends[number + 1]] = leaf.grad
        found[:, self._ends[-2] : self._ends[-1]] = last
        self._taken.clear()
        return found

    def abandon(self) -> None:
        """Bring the gradients of parts to the trunk as they come, since there is no last part."""
        hidden, self.hidden = self.hidden, None
        if hidden is None or not hidden.requires_grad:
            return
        taken = [(number, leaf) for number, leaf in enumerate(self._taken) if leaf is not None]
        for number, leaf in taken:
            if leaf.grad is not None:
                self._send(hidden, number, leaf)
            else:
                late: Any = functools.partial(self._send, hidden, number)
                leaf.register_post_accumulate_grad_hook(late)  # type: ignore[no-untyped-call]

    def _send(self, hidden: Tensor, number: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient = hidden.new_zeros(hidden.shape)
        gradient[:, self._ends[number] : self._ends[number + 1]] = leaf.grad
        self._taken[number] = None
        is_last = all(part is None for part in self._taken)
        torch.autograd.backward(hidden, gradient, retain_graph=not is_last)


class _Last(torch.autograd.Function):
    """The last part: its backward pass is that of all."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parts: _Parts, begin: int, end: int) -> Tensor:
        ctx.parts, ctx.like = parts, hidden.shape
        return hidden[:, begin:end].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.parts.gradient(gradients[0], ctx.like), None, None, None


def _is_of(call: Mapping[str, Any], batch: Any) -> bool:
    """Whether a call has the tensors of a micro-batch, which nobody has replaced."""
    return isinstance(batch, Mapping) and all(
        _is_same(call.get(name), batch.get(name)) for name in _OF_BATCH
    )


def _is_same(value: Any, other: Any) -> bool:
    """Whether it is the very tensor, or a copy as wrappers make it on the CPU."""
    if value is other or not (isinstance(value, Tensor) and isinstance(other, Tensor)):
        return value is other
    is_on_host = value.device.type == other.device.type == "cpu"
    return is_on_host and value.dtype == other.dtype and torch.equal(value, other)


def _versions(batch: Any) -> list[int]:
    """How often the tensors that a pass is made of were written to."""
    if not isinstance(batch, Mapping):
        return []
    return [batch[name]._version for name in _OF_BATCH if isinstance(batch.get(name), Tensor)]


def _of_batch(batch: _Batch) -> dict[str, Any]:
    return {name: batch[name] for name in _OF_BATCH if batch.get(name) is not None}


def _planned(forward: Packer, batch: Any) -> Packing | None:
    """How a micro-batch that is to come packs; None where it doesn't."""
    if not isinstance(batch, Mapping) or batch.get("attention_mask") is None:
        return None
    call = _of_batch(batch)
    if isinstance(batch.get("labels"), Tensor):
        call["labels"] = batch["labels"]
    return forward.planned(call, batch.get(BATCH_KEY))


def undo(model: Any) -> None:
    """Take the trunk's seam away."""
    found = seam.of(model.base_model)
    if found is not None:
        found.around = None
        seam.close(model.base_model)
