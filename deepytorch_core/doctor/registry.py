"""The checks, in the order in which they are shown, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deepytorch_core.base import distribution
from deepytorch_core.doctor.checks import (
    adapter,
    cache,
    clocks,
    compiler,
    connections,
    container,
    core,
    data,
    driver,
    extensions,
    files,
    frameworks,
    interface,
    iommu,
    kernels,
    link,
    memlock,
    mtu,
    nccl,
    numa,
    nvlink,
    p2p,
    package,
    pcie,
    ranks,
    shm,
    torch,
    variables,
)
from deepytorch_core.doctor.finding import Finding, fail, warn
from deepytorch_core.doctor.machine import Machine


@dataclass(frozen=True)
class Check:
    """A check: `gather` looks, `judge` is a pure function of what it found.

    `asks_torch` is set where a process with torch is started for it, which takes seconds.
    """

    name: str
    gather: Callable[[Machine], Any]
    judge: Callable[[Any], list[Finding]]
    about: str
    asks_torch: bool = False


def _check(module: Any, *, asks_torch: bool = False) -> Check:
    return Check(
        name=module.__name__.rpartition(".")[2],
        gather=module.gather,
        judge=module.judge,
        about=(module.__doc__ or "").partition("\n")[0].rstrip("."),
        asks_torch=asks_torch,
    )


CHECKS: tuple[Check, ...] = (
    _check(torch, asks_torch=True),
    _check(driver, asks_torch=True),
    _check(nccl, asks_torch=True),
    _check(package),
    _check(core),
    _check(kernels, asks_torch=True),
    _check(adapter, asks_torch=True),
    _check(compiler, asks_torch=True),
    _check(cache),
    _check(extensions),
    _check(frameworks),
    _check(variables),
    _check(connections, asks_torch=True),
    _check(p2p, asks_torch=True),
    _check(iommu),
    _check(pcie),
    _check(nvlink),
    _check(numa),
    _check(clocks),
    _check(interface),
    _check(mtu),
    _check(link),
    _check(ranks),
    _check(shm),
    _check(memlock),
    _check(files),
    _check(container),
    _check(data),
)


def chosen(only: Sequence[str]) -> tuple[Check, ...]:
    """The checks of these names, all for none. Raises ValueError listing the names."""
    known = {check.name: check for check in CHECKS}
    for name in only:
        if name not in known:
            raise ValueError(f"no check {name!r}; known: {', '.join(known)}")
    return tuple(check for check in CHECKS if not only or check.name in only)


def examine(machine: Machine, checks: Sequence[Check]) -> Iterator[Finding]:
    """Yield what the checks find, in their order, as soon as it is known. Never raises."""
    if any(check.asks_torch for check in checks):
        machine.begin()
    for check in checks:
        for finding in _findings(machine, check):
            yield finding.of(check.name)


def _findings(machine: Machine, check: Check) -> list[Finding]:
    try:
        return check.judge(check.gather(machine))
    except ImportError as error:
        text = f"not checked: {error}"
        return [fail(text, distribution.REINSTALL)]
    except Exception as error:
        # A machine may be odd in a way nobody foresaw; the other checks are still worth having.
        text = f"not checked: {type(error).__name__}: {error}"
        return [warn(text, f"deepytorch doctor --only {check.name}   # and report this line")]
