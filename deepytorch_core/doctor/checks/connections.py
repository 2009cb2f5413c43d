"""`CUDA_DEVICE_MAX_CONNECTIONS` suits the framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepytorch_core.doctor.finding import Finding, fail, not_here, okay, warn
from deepytorch_core.doctor.machine import Machine

_NAME = "CUDA_DEVICE_MAX_CONNECTIONS"
_MEGATRON = ("megatron-core", "nemo-toolkit", "megatron-bridge")
_OTHERS = ("deepspeed", "accelerate", "transformers")
_BLACKWELL = 10


@dataclass(frozen=True)
class ConnectionFacts:
    """The variable, None when unset; installed frameworks with versions; GPUs' capabilities."""

    value: str | None
    frameworks: Mapping[str, str]
    capabilities: tuple[str, ...]


def gather(machine: Machine) -> ConnectionFacts:
    installed = machine.distributions
    return ConnectionFacts(
        value=machine.environment.get(_NAME),
        frameworks={name: installed[name] for name in _MEGATRON + _OTHERS if name in installed},
        capabilities=tuple(device.capability for device in machine.torch.devices),
    )


def judge(facts: ConnectionFacts) -> list[Finding]:
    value = facts.value
    if value is not None and not (value.isdecimal() and 1 <= int(value) <= 32):
        return [fail(f"{_NAME}={value}: expected 1 to 32", f"unset {_NAME}")]
    if not facts.capabilities:
        return [not_here(f"no GPU; {_NAME} is {value or 'unset'}")]
    has_megatron = [name for name in _MEGATRON if name in facts.frameworks]
    before_blackwell = any(
        int(capability.split(".")[0]) < _BLACKWELL for capability in facts.capabilities
    )
    if value == "1" and not has_megatron:
        text = f"{_NAME}=1 and no Megatron: FSDP and ZeRO can't overlap copies and communication"
        return [warn(text, f"unset {_NAME}")]
    if value != "1" and has_megatron and before_blackwell:
        text = (
            f"{_NAME} is {value or 'unset'} and {has_megatron[0]} is installed: tensor or sequence "
            "parallelism on these GPUs needs 1 to overlap (FSDP needs it unset)"
        )
        return [warn(text, f"export {_NAME}=1")]
    return [okay(f"{_NAME} is {value or 'unset'}, with {_list(facts.frameworks)}")]


def _list(frameworks: Mapping[str, str]) -> str:
    return ", ".join(frameworks) or "no framework besides torch"
