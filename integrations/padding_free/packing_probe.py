"""Whether a model gives the same on one packed row as on a padded batch, found out by trying.

Three tries on a few tokens, in eval mode, none of them trained on. First, which tokens every
attention of the model sees, from the masks that transformers makes, far beyond the few tokens of
the other tries. Then logits, loss and whatever else the model gives, packed against padded. Last,
that what one sequence holds has no effect on another, which noise can't hide in low precision.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deepytorch.integrations.common.contract import IntegrationError
from deepytorch_core.compile.fixes._transformers import caches
from deepytorch_core.data import Packing, plan

from . import packed_attention, packing_contents, unpacked_output
from .packed_forward import FUSED_HEAD, Conventions, PackedForward
from .packed_trunk import PackedTrunk, pools

_SEEN_UP_TO = 1 << 15
_LENGTHS = (7, 12, 1, 9)
_WIDTH = 12
# Largest difference of packed and padded logits, as a part of the largest logit.
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
_TF32_NOISE = 1e-2  # float32 on CUDA may be multiplied in less
# A deep model's own rounding may be more in 16-bit floats. It shows in how far a sequence's logits
# in a batch are from those by itself. A difference up to `_ROOM` times that is as good.
# `_MOST_NOISE` is the limit, a part that no wrong row stays within.
_ROOM = 2.0
_MOST_NOISE = 0.25
_LARGE_COUNT, _COUNT_NOISE = 1 << 10, 0.02
_ALONE = max(range(len(_LENGTHS)), key=_LENGTHS.__getitem__)
_MASKED_BY_LENGTH = ("dynamic", "longrope")


class Unsupported(Exception):
    """The model has to keep its padding; the message says why."""


def probe(
    model: Any, call: Callable[..., Any], *, precision: torch.dtype, as_trained: bool = False
) -> Conventions:
    """Find out how to pack for a model.

    Args:
        model: a transformers model, on its device.
        call: runs its forward pass; not `model` itself where a wrapper gathers its parameters.
        precision: the least precise dtype that it computes in.
        as_trained: whether to try it in training, for one that draws nothing there; else in eval.

    Raises Unsupported.
    """
    if not getattr(model, "_can_set_attn_implementation", bool)():
        raise Unsupported(f"{type(model).__name__} has an attention of its own")
    if getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder and a decoder, which see each other")
    for rope in _ropes(model):
        if rope in _MASKED_BY_LENGTH:
            raise Unsupported(f"its position encoding ({rope}) depends on the padded length")
    with contextlib.nullcontext() if as_trained else _evaluating(model), torch.no_grad():
        try:
            _check_masks(model, call)
            compare = _compare_pooled if pools(model) else _compare
            for lower in _may_compute_in(model, precision):
                with torch.autocast(_device(model).type, dtype=lower):
                    compare(model, call, lower)
            return compare(model, call, precision)
        except Unsupported:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            raise Unsupported(f"a packed row fails: {type(error).__name__}: {reason}") from error


def _ropes(model: Any) -> Iterator[Any]:
    """The kinds of rotary positions, by what the configuration and the modules say."""
    waiting = [getattr(model.config, name, None) for name in ("rope_parameters", "rope_scaling")]
    while waiting:
        settings = waiting.pop()
        if isinstance(settings, dict):  # one for each kind of layer may lie within
            yield from (
                settings[name]
                for name in ("rope_type", "type")
                if isinstance(settings.get(name), str)
            )
            waiting += settings.values()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        yield from kinds.values() if isinstance(kinds, dict) else (kinds,)


def _may_compute_in(model: Any, precision: torch.dtype) -> list[torch.dtype]:
    """Return the types of autocasts that a loop may yet have, for which GPUs have other kernels."""
    if precision != torch.float32 or _device(model).type != "cuda":
        return []
    return [torch.float16, *([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])]


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    config: Any = model.config
    settings = dict(vars(config))  # some models note there what kind of labels they have met
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        vars(config).clear()
        vars(config).update(settings)


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _check_masks(model: Any, call: Callable[..., Any]) -> None:
    checked: list[Any] = []
    plain_mask = packed_attention.stock_mask("sdpa")
    plain = packed_attention.stock_attention("sdpa")

    def mask(*args: Any, **kwargs: Any) -> Any:
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made = plain_mask(*args, **{**kwargs, **skips})
        made.mask_function = kwargs.get("mask_function")
        return made

    def attention(stock: Any, module: torch.nn.Module, *given: Any, **kwargs: Any) -> Any:
        query, key, value, *rest = given
        attention_mask = rest[0] if rest else kwargs["attention_mask"]
        function = getattr(attention_mask, "mask_function", None)
        if function is None:
            raise Unsupported(f"{type(module).__name__} makes an attention mask of its own")
        said = packed_attention.sees(module, kwargs)
        if (function, said) not in checked:
            checked.append((function, said))
            _check_mask(function, said, type(module).__name__)
        kwargs = {name: kwargs[name] for name in ("scaling", "is_causal") if name in kwargs}
        return plain(module, query, key, value, attention_mask, **kwargs)

    with packed_attention.trying(attention, mask):
        ids = torch.ones(1, 4, dtype=torch.int64, device=_device(model))
        call(input_ids=ids, **_uncached(model))
    if not checked:
        raise Unsupported(f"{type(model).__name__} doesn't use transformers' attention interface")


def _check_mask(
    function: Callable[..., Tensor], said: tuple[bool, tuple[int, int] | None], name: str
) -> None:
    causal, window = said
    last = _SEEN_UP_TO - 1
    on_host: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    query = torch.tensor([0, 1, 2, 63, 511, 4095, last // 2, last], **on_host).unsqueeze(1)
    key = torch.arange(_SEEN_UP_TO, **on_host).unsqueeze(0)
    zero = torch.zeros((), **on_host)
    truly = function(zero, zero, query, key).expand(query.shape[0], key.shape[1])
    distance = key - query
    expected = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        expected = expected & (distance >= -window[0]) & (distance <= window[1])
    if not torch.equal(truly.cpu(), expected):
        raise Unsupported(f"{name} masks more than causality and a sliding window")


def _compare(model: Any, call: Callable[..., Any], precision: torch.dtype) -> Conventions:
    batch = _batch(model)
    try:
        with _called_tables(model) as tables:
            padded = call(**batch, **_uncached(model))
    except (IndexError, ValueError, RuntimeError, TypeError):
        fewest = min((embedding.num_embeddings for embedding in _tables(model)), default=_WIDTH)
        if fewest < _WIDTH:
            raise Unsupported(f"its {fewest} positions are too few to try it out") from None
        raise Unsupported("it takes no labels of each token") from None
    table = next(iter(tables), None)
    logits, loss = _results(padded, (len(_LENGTHS), _WIDTH))
    tolerance = _NOISE.get(precision, 1e-4)
    if logits.is_cuda and precision == torch.float32:
        tolerance = _TF32_NOISE
    real = batch["attention_mask"] != 0
    largest = max(float(logits[real].abs().max()), 1e-3)
    loss_bound = max(tolerance * abs(float(loss)), 1e-6)
    if precision in (torch.bfloat16, torch.float16):
        # Always, not where it turns out to be needed: passes of sharded models are collective.
        noise = _own_noise(model, call, batch, logits) / largest
        tolerance = max(tolerance, min(_ROOM * noise, _MOST_NOISE))
    bound = tolerance * largest
    tried = packing_contents.Tried(functools.partial(call, **_uncached(model)), tolerance)
    special = packing_contents.special(model, batch, tried.call)
    limit = None if table is None else int(table.num_embeddings)
    shifted = _shifts_labels(call, batch, model)
    difference = loss_difference = float("nan")
    is_plain = False  # the same but for special ids
    for counting in _countings(table):
        conventions = replace(counting, shifted=shifted, max_positions=limit)
        row, packing = _run_packed(model, call, batch, conventions)
        difference = float((packing.unpack(row.logits) - logits)[real].abs().max())
        loss_difference = abs(float(row.loss) - float(loss))
        if difference > bound or loss_difference > loss_bound:
            continue
        is_plain = True
        run = functools.partial(_run_packed, model, call, conventions=conventions)
        if not tried.are_alike(special, run):
            continue
        _check_apart(model, call, batch, conventions)
        _check_fields(padded, row, packing, tolerance)
        return replace(
            conventions,
            fused_head=_fused_head_packs(model, call, (batch, conventions, tolerance)),
            counts_items=_counts_items(call, batch, model),
            per_token=tried.per_token(model, batch, run),
            by_position=_goes_by_position(model, call, (batch, conventions, tolerance)),
        )
    if is_plain:
        raise Unsupported("some token ids have an effect on other tokens of the padded batch")
    if difference <= bound:
        raise Unsupported(f"the loss of a packed row differs by {loss_difference:.2g}")
    raise Unsupported(f"logits of a packed row differ by {difference:.2g}")


def _compare_pooled(model: Any, call: Callable[..., Any], precision: torch.dtype) -> Conventions:
    """The same for a head that takes a part of each sequence: only the trunk is packed."""
    if model.base_model is model or model.config.pad_token_id is None:
        raise Unsupported("it has no trunk below its head, or no id for padding")
    tolerance = _NOISE.get(precision, 1e-4)
    if _device(model).type == "cuda" and precision == torch.float32:
        tolerance = _TF32_NOISE
    for is_aligned in (False, True):
        # The last row's sequence doesn't begin in the first column.
        rows = slice(len(_LENGTHS) - is_aligned)
        batch = {name: rest[rows] for name, rest in _batch(model).items() if name != "labels"}
        with _called_tables(model) as tables:
            logits, hidden = _pooled(model, call, batch)
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != rows.stop:
            raise Unsupported("its output has no logits for each sequence")
        table = next(iter(tables), None)
        limit = None if table is None else int(table.num_embeddings)
        for counting in _countings(table):
            found = replace(counting, max_positions=limit, of_trunk=True, is_aligned=is_aligned)
            if _difference((logits, hidden), _run_trunk(model, call, batch, found)) <= tolerance:
                return _checked(model, call, batch, found, tolerance)
    raise Unsupported("logits of a packed row differ")


def _checked(
    model: Any,
    call: Callable[..., Any],
    batch: dict[str, Tensor],
    conventions: Conventions,
    tolerance: float,
) -> Conventions:
    """Try other contents of a batch with which plain text packs; returns which arguments do."""
    taking = replace(conventions, per_token=packing_contents.PER_TOKEN)

    def are_alike(given: dict[str, Tensor]) -> bool:
        stock = _pooled(model, call, given)
        return _difference(stock, _run_trunk(model, call, given, taking)) <= tolerance

    uncached = functools.partial(call, **_uncached(model))
    if not are_alike(packing_contents.special(model, batch, uncached)):
        raise Unsupported("some token ids have an effect on other tokens of the padded batch")
    least, most = 4, model.get_input_embeddings().num_embeddings - 1
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    first = changed["input_ids"][0, : _LENGTHS[0]]
    first.copy_(torch.where(first + 1 > most, min(least, most), first + 1))
    before, after = (_run_trunk(model, call, given, conventions) for given in (batch, changed))
    others = slice(_LENGTHS[0], None)
    if _difference((before[0][1:], before[1][others]), (after[0][1:], after[1][others])) > 1e-6:
        raise Unsupported("sequences of a packed row have an effect on each other")
    return replace(conventions, per_token=packing_contents.per_token(model, batch, are_alike))


def _pooled(
    model: Any, call: Callable[..., Any], batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Logits of each sequence, and the trunk's hidden states [tokens, width] without padding."""
    seen: list[Tensor] = []
    hook = model.base_model.register_forward_hook(
        lambda trunk, args, output: seen.append(output[0][batch["attention_mask"] != 0])
    )
    try:
        logits: Any = getattr(call(**batch, **_uncached(model)), "logits", None)
    finally:
        hook.remove()
    return logits, seen[0]


def _run_trunk(
    model: Any, call: Callable[..., Any], batch: dict[str, Tensor], conventions: Conventions
) -> tuple[Tensor, Tensor]:
    """The same of a batch whose trunk is packed."""
    trunk = model.base_model
    was_training, trunk.training = trunk.training, True  # its own flag alone: it packs in training
    remove = PackedTrunk(model, conventions, strict=True).install(model)
    try:
        return _pooled(model, call, batch)
    finally:
        remove()
        trunk.training = was_training


def _difference(expected: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> float:
    """The largest one of each pair, as a part of the largest that is expected."""
    return max(
        float((mine - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-3)
        for theirs, mine in zip(expected, given, strict=True)
    )


def _own_noise(
    model: Any, call: Callable[..., Any], batch: dict[str, Tensor], logits: Tensor
) -> float:
    """How far the stock model's logits are from its own for a sequence without the others."""
    kept = batch["attention_mask"][_ALONE] != 0
    alone = call(input_ids=batch["input_ids"][_ALONE, kept][None], **_uncached(model)).logits
    return float((alone[0] - logits[_ALONE, kept]).abs().max())


def _check_fields(padded: Any, row: Any, packing: Packing, tolerance: float) -> None:
    """Every field of the output for a packed row is the padded batch's once it is unpacked."""
    unpacked = unpacked_output.unpacked(row, packing, packing.num_tokens, lazily=True)
    tensors = [leaf for leaf in tree_leaves(dict(padded)) if isinstance(leaf, Tensor)]
    largest = max(float(tensor.abs().max()) for tensor in tensors if tensor.is_floating_point())
    for name in padded:
        try:
            pairs = zip(tree_leaves(padded[name]), tree_leaves(unpacked[name]), strict=True)
            same = all(_same(*pair, packing, tolerance * largest) for pair in pairs)
        except (IntegrationError, KeyError, ValueError):
            same = False
        if not same:
            raise Unsupported(f"a packed row gives another {name}")


def _same(expected: Any, given: Any, packing: Packing, bound: float) -> bool:
    if not isinstance(expected, Tensor) or not expected.dim():
        return True  # the loss is compared already, with all that goes into it
    if expected.shape != given.shape:
        return False
    if not expected.is_floating_point():
        return True  # such as which token is likeliest, which rounding may change
    difference = (expected - given).abs()
    size = packing.shape
    if tuple(difference.shape[:2]) == size:
        difference = packing.pack(difference)
    elif difference.shape[0] == size[0] * size[1]:
        difference = packing.pack(difference.unflatten(0, size))
    return bool(difference.max() <= bound)


def _fused_head_packs(model: Any, call: Callable[..., Any], tried: Any) -> bool:
    """Whether TRL has given the model a fused head, and what it gives for a packed row is right."""
    if not _has_fused_head(model):
        return False
    batch, conventions, tolerance = tried
    fused = {**batch, FUSED_HEAD: True}
    try:
        padded = call(**fused)
        row, packing = _run_packed(model, call, fused, conventions)
        _check_fields(padded, row, packing, tolerance)
    except Exception:
        return False  # batches stay padded when the head is asked for, and say so
    return True


def _goes_by_position(model: Any, call: Callable[..., Any], tried: Any) -> bool:
    """Whether stock keeps a row's sequences apart by their positions, where it gets no mask."""
    batch, conventions, tolerance = tried
    row, packing = _run_packed(model, call, batch, conventions)
    forward = PackedForward(model, model, conventions, strict=True)
    given = forward.pack(dict(batch), packing, is_filled=False)
    names = ("input_ids", "position_ids", "labels")
    try:
        stock = call(**{name: given[name] for name in names}, **_uncached(model))
        difference = float((stock.logits - row.logits).abs().max())
    except Exception:  # whatever a model has against such a row
        return False
    return bool(difference <= tolerance * max(float(row.logits.abs().max()), 1e-3))


def _has_fused_head(model: Any) -> bool:
    """Whether the forward pass, or what it wraps, takes the argument."""
    forward = model.forward
    while forward is not None:
        if FUSED_HEAD in inspect.signature(forward, follow_wrapped=False).parameters:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _shifts_labels(call: Callable[..., Any], batch: dict[str, Tensor], model: Any) -> bool:
    """Whether the loss compares a token with the next label: then it never sees a row's first."""
    labels = torch.full_like(batch["labels"], -100)
    labels[:2, 0] = batch["labels"][:2, 0]
    loss = call(**{**batch, "labels": labels}, **_uncached(model)).loss
    return not bool(loss.isfinite()) or float(loss) == 0


def _counts_items(call: Callable[..., Any], batch: dict[str, Tensor], model: Any) -> bool:
    """Whether the loss is a sum over tokens divided by `num_items_in_batch`, and nothing else.

    With a count this large whatever is added to it besides, such as a router's loss, is most of it.
    """
    sums = []
    for count in (1, _LARGE_COUNT):
        items = torch.tensor(count, dtype=torch.int64, device=batch["labels"].device)
        try:
            output = call(**batch, num_items_in_batch=items, **_uncached(model))
        except (TypeError, ValueError):
            return False
        sums.append(float(output.loss) * count)
    return abs(sums[1] - sums[0]) <= _COUNT_NOISE * abs(sums[0])


def _check_apart(
    model: Any, call: Callable[..., Any], batch: dict[str, Tensor], conventions: Conventions
) -> None:
    """Check that the first sequence has no effect on the others."""
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0] = changed["input_ids"][0].flip(0)
    before, _ = _run_packed(model, call, batch, conventions)
    after, _ = _run_packed(model, call, changed, conventions)
    apart = (before.logits - after.logits)[:, _LENGTHS[0] :].abs().max()
    if float(apart) > 1e-6 * float(before.logits.abs().max()):
        raise Unsupported("sequences of a packed row have an effect on each other")


def _run_packed(
    model: Any, call: Callable[..., Any], batch: dict[str, Tensor], conventions: Conventions
) -> Any:
    packing = plan(batch["attention_mask"], batch["labels"], shifted=conventions.shifted)
    packing = packing.to(batch["input_ids"].device)
    forward = PackedForward(model, model, conventions, strict=True)
    with packed_attention.packed_forward():
        return call(**forward.pack(dict(batch), packing)), packing


def _batch(model: Any) -> dict[str, Tensor]:
    """Padded on either side, a whole row, a single token; labels at tokens only."""
    device, generator = _device(model), torch.Generator().manual_seed(0)
    size = (len(_LENGTHS), _WIDTH)
    vocabulary = model.get_input_embeddings().num_embeddings
    # Not the first ids, which may mean something to a model: padding, for one.
    on_host: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    least = min(4, vocabulary - 1)
    ids = torch.randint(least, vocabulary, size, generator=generator, **on_host)
    mask = torch.zeros(size, **on_host)
    for row, length in enumerate(_LENGTHS):
        mask[row, :length] = 1
    mask[-1] = mask[-1].flip(0)
    outputs = getattr(model.config, "num_labels", 2)
    classes = vocabulary if _predicts_tokens(model) else outputs
    labels = torch.randint(0, classes, size, generator=generator, **on_host)
    labels[mask == 0] = -100
    labels[-1, _WIDTH - _LENGTHS[-1]] = -100  # else a causal model predicts it from padding
    ids[mask == 0] = getattr(model.config, "pad_token_id", None) or 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _predicts_tokens(model: Any) -> bool:
    return model.get_output_embeddings() is not None


def _uncached(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if caches(model) else {}


def _results(output: Any, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    logits, loss = getattr(output, "logits", None), getattr(output, "loss", None)
    if not isinstance(logits, Tensor) or tuple(logits.shape[:2]) != size:
        raise Unsupported("its output has no logits for each token")
    if not isinstance(loss, Tensor) or loss.dim() or not bool(loss.isfinite()):
        raise Unsupported("it gives no loss for labels of each token")
    return logits, loss


def _tables(model: torch.nn.Module) -> list[torch.nn.Embedding]:
    """Tables of learned positions, by the names that they go by."""
    names = ("position_embeddings", "embed_positions", "wpe", "position_embedding")
    return [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in names and isinstance(module, torch.nn.Embedding)
    ]


@contextmanager
def _called_tables(model: torch.nn.Module) -> Iterator[list[torch.nn.Embedding]]:
    """Those that are looked into while this is open: a vision tower has its own."""
    found: list[torch.nn.Embedding] = []
    hooks = [
        embedding.register_forward_pre_hook(lambda table, _: found.append(table))
        for embedding in _tables(model)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _countings(table: torch.nn.Embedding | None) -> Iterator[Conventions]:
    """How a model may count positions."""
    yield Conventions(shifted=False, first_position=None, max_positions=None)
    padding = None if table is None else table.padding_idx
    if padding is not None:
        yield Conventions(False, padding + 1, None, padding_id=padding)
        yield Conventions(False, padding + 1, None)
    yield Conventions(False, 0, None)
