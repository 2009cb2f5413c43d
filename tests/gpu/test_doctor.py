"""`deepytorch doctor` and `topology --measure` on real GPUs."""

from __future__ import annotations

import pytest
import torch

from deepytorch_core.doctor import registry, smi, torch_facts
from deepytorch_core.doctor.machine import Machine
from deepytorch_core.testing import needs_gpus
from deepytorch_core.topology import machine_map
from deepytorch_core.topology import model as topology

pytestmark = pytest.mark.gpu


@needs_gpus(1)
def test_every_check_comes_to_an_answer() -> None:
    machine = Machine(limit_s=100.0)
    findings = list(registry.examine(machine, registry.CHECKS))
    assert not [finding for finding in findings if "not checked" in finding.evidence]
    assert len(machine.torch.devices) == torch.cuda.device_count()
    assert machine.torch.error == ""
    assert len(smi.ask()) >= 1


@needs_gpus(2)
def test_all_pairs_are_measured_and_drawn() -> None:
    facts = torch_facts.ask(100.0)
    num_gpus = len(facts.devices)
    assert len(facts.pairs) == num_gpus * (num_gpus - 1)
    assert all(pair.is_right and pair.direct_gbps > 0 for pair in facts.pairs)
    names = {device.index: device.uuid for device in facts.devices}
    rates = {(names[pair.source], names[pair.target]): pair.direct_gbps for pair in facts.pairs}
    found = machine_map.links(machine_map.with_measured(topology.discover(), rates))
    assert any(link.is_measured for link in found)
