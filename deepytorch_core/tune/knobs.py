"""The knobs that `deepytorch tune` can set: a number each, with the values worth a try.

A knob without a variable is a framework's argument and is set by a seam (`seams`, or an adapter
that asks `in_force`). One with a variable is set in the environment before the native core, or
NCCL, reads it. A knob that is not set leaves things as they are without `deepytorch tune`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FRAMEWORK, PLAN, TRANSPORT = "framework", "plan", "transport"
LAYERS = (FRAMEWORK, PLAN, TRANSPORT)

Setting = frozenset[tuple[str, int]]
"""Names and values of the knobs that are set; all others keep their defaults."""

DEFAULTS: Setting = frozenset()


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A setting of one layer.

    Args:
        name: as in the profile.
        layer: one of LAYERS.
        values: what to try beside the default, in the order of trying.
        least: the smallest value that is valid.
        most: the largest.
        step: of which all valid values are multiples.
        is_graded: whether half and twice a value that is faster are worth a try, too.
        variable: the environment variable that carries it; "" for a framework's argument.
        device: "cpu" or "cuda" where it only has an effect there.
        between_nodes: whether it only has an effect between nodes.
    """

    name: str
    layer: str
    values: tuple[int, ...]
    least: int
    most: int
    step: int = 1
    is_graded: bool = False
    variable: str = ""
    device: str = ""
    between_nodes: bool = False


_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

KNOBS: tuple[Knob, ...] = (
    # MiB of DDP's buckets; a value also sets the first bucket's.
    Knob(
        name="ddp_bucket_mb",
        layer=FRAMEWORK,
        values=(4, 64, 256, 1024),
        least=1,
        most=1 << 20,
        is_graded=True,
    ),
    # Units of FSDP2 whose parameters are gathered ahead.
    Knob(name="fsdp2_prefetch", layer=FRAMEWORK, values=(1, 2, 4), least=1, most=64),
    # In elements, as DeepSpeed counts.
    Knob(
        name="zero_reduce_bucket",
        layer=FRAMEWORK,
        values=(1 << 22, 1 << 24, 1 << 26, 1 << 28),
        least=1,
        most=1 << 40,
        is_graded=True,
    ),
    Knob(
        name="zero_prefetch_bucket",
        layer=FRAMEWORK,
        values=(1 << 22, 1 << 24, 1 << 26),
        least=1,
        most=1 << 40,
        is_graded=True,
    ),
    # 1: each gradient goes to the rank that owns it alone. Half the bytes of an all_reduce of all,
    # in more operations, which one after the other use a link in one direction at a time.
    Knob(name="zero_reduce_to_owner", layer=FRAMEWORK, values=(1,), least=0, most=1),
    Knob(
        name="chunk_bytes",
        layer=PLAN,
        values=(64 * _KIB, 256 * _KIB, 16 * _KIB),
        least=64,
        most=256 * _KIB,
        step=64,
        is_graded=True,
        variable="DEEPYTORCH_CHUNK_BYTES",
        device="cpu",
    ),
    Knob(
        name="num_channels",
        layer=PLAN,
        values=(16, 8, 32),
        least=1,
        most=64,
        variable="NCCL_MIN_NCHANNELS",
        device="cuda",
    ),
    Knob(
        name="num_sockets",
        layer=TRANSPORT,
        values=(4, 8, 2, 16, 1),
        least=1,
        most=64,
        variable="DEEPYTORCH_NUM_SOCKETS",
        device="cpu",
        between_nodes=True,
    ),
    Knob(
        name="socket_bytes",
        layer=TRANSPORT,
        values=(4 * _MIB, 1 * _MIB, 16 * _MIB),
        least=64 * _KIB,
        most=_GIB,
        is_graded=True,
        variable="DEEPYTORCH_SOCKET_BYTES",
        device="cpu",
        between_nodes=True,
    ),
    Knob(
        name="nccl_buffer_bytes",
        layer=TRANSPORT,
        values=(16 * _MIB, 8 * _MIB, 2 * _MIB),
        least=64 * _KIB,
        most=_GIB,
        is_graded=True,
        variable="NCCL_BUFFSIZE",
        device="cuda",
        between_nodes=True,
    ),
    Knob(
        name="nccl_sockets",
        layer=TRANSPORT,
        values=(4, 2),
        least=1,
        most=16,
        variable="NCCL_NSOCKS_PERTHREAD",
        device="cuda",
        between_nodes=True,
    ),
    Knob(
        name="nccl_socket_threads",
        layer=TRANSPORT,
        values=(4, 2),
        least=1,
        most=16,
        variable="NCCL_SOCKET_NTHREADS",
        device="cuda",
        between_nodes=True,
    ),
)

_BY_NAME = {knob.name: knob for knob in KNOBS}


def knob(name: str) -> Knob:
    """The knob of that name. Raises ValueError listing the names there are."""
    if name not in _BY_NAME:
        raise ValueError(f"unknown setting {name!r}; known: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def checked(settings: object) -> Setting:
    """Settings from JSON, as `in_force` takes them.

    Raises ValueError for what is no mapping, an unknown name or a value out of range.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"settings are {type(settings).__name__}, not an object")
    for name, value in settings.items():
        known = knob(str(name))
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} is {value!r}, not a whole number")
        if not known.least <= value <= known.most or value % known.step:
            multiple = f", a multiple of {known.step}" if known.step > 1 else ""
            raise ValueError(f"{name} is {value}: expected {known.least} to {known.most}{multiple}")
    return frozenset(settings.items())


def as_dict(setting: Setting) -> dict[str, int]:
    """For JSON, in the order of KNOBS."""
    values = dict(setting)
    return {known.name: values[known.name] for known in KNOBS if known.name in values}


def in_words(setting: Setting) -> str:
    """For people: "ddp_bucket_mb=8, num_sockets=4", or "defaults"."""
    return ", ".join(f"{name}={value}" for name, value in as_dict(setting).items()) or "defaults"


def layers_of(setting: Setting) -> tuple[str, ...]:
    """The layers whose knobs are set, in the order of LAYERS."""
    used = {knob(name).layer for name, _ in setting}
    return tuple(layer for layer in LAYERS if layer in used)
