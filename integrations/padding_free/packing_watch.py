"""Learns from a model's own first steps whether it may train without padding.

The steps run as they are. The hooks see who reads what of the outputs, and what the model is called
with. They also see whether its passes draw from a generator that the program uses too. A helper
(`packing_helper`) finds out meanwhile, on a twin, whether packed rows give what padded batches
give. The training waits for none of it.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import time
import weakref
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from deepytorch.integrations.common.hook import Hook
from deepytorch_core import guard
from deepytorch_core.base import config, cpu_affinity, decisions
from deepytorch_core.compile import undecided
from deepytorch_core.topology import model as topology

from . import packing_twin, unpacked_output
from .packed_forward import Conventions
from .packed_trunk import pools
from .packing_helper import Helper
from .packing_probe import Unsupported

# Calls that are watched at least, for readers that come every few steps only; and after which a
# helper is started, which takes some steps itself.
_WATCHED, _BEFORE_HELPER = 8, 2
# Calls that are watched at most before a helper is started, which short runs never see.
_MOST_BEFORE_HELPER = 64
# Seconds that a helper takes of one core. The second value is the part of a run that may be taken
# where the helper has to share that core with the training.
_HELPER_S, _LARGEST_SHARE = 10.0, 0.03
_SPARE_CORES = 2
# A helper's environment says this, too: it computes a little, on the CPU alone.
_OF_HELPER = {
    "CUDA_VISIBLE_DEVICES": "",
    "DEEPYTORCH_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
WHAT = "padding-free"


class PackingWatch:
    """The hooks of one model that is watched.

    Args:
        outer: what a training loop calls inside its wrappers.
        model: the transformers model in it.
        then: gets both and the conventions by which to pack, once they are known and nothing was
            seen that forbids it. The hooks are gone then.

    It keeps neither alive.
    """

    def __init__(
        self, outer: Any, model: Any, then: Callable[[Any, Any, Conventions], None]
    ) -> None:
        self._outer_of = weakref.ref(outer)
        self._model_of = weakref.ref(model)
        self._then = then
        self._num_calls = 0
        self._began = time.monotonic()
        self._obstacle: str | None = None
        self._random: torch.Tensor | None = None
        self._helper: Helper | None = None  # that was asked
        self._ready: Helper | None = None  # to be asked
        self._known: dict[str, Any] | None = None  # by the profile
        self._key: dict[str, Any] = {}
        undecided.register(outer, lambda: True)
        self._handles = (
            outer.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            # First of all: the others see what the program will see.
            outer.register_forward_hook(Hook(self._after), prepend=True),
        )
        self._make_ready()

    @property
    def _outer(self) -> Any:
        return self._outer_of()

    @property
    def _model(self) -> Any:
        return self._model_of()

    def close(self) -> None:
        """Take the hooks off, and end the helper."""
        for handle in self._handles:
            handle.remove()
        if self._outer is not None:
            undecided.register(self._outer, None)
        for helper in (self._helper, self._ready):
            if helper is not None:
                helper.close()

    def _make_ready(self) -> None:
        """Start a helper beside the program's own preparations, if it is likely to be asked."""
        if config.current().patience == "off" or self._least_run_s > 0:
            return
        try:
            twin = pickle.dumps(packing_twin.describe(self._outer, self._model))
        except Exception:  # the first steps ask again, and tell
            return
        if self._known_of(twin) is None:
            self._ready = self._new_helper(is_awaited=False)

    def _new_helper(self, *, is_awaited: bool) -> Helper:
        environment = config.child_environment(**_OF_HELPER)
        return Helper(environment, is_awaited=is_awaited)

    def _before(self, outer: Any, args: Any, kwargs: Any) -> None:
        self._random = None
        if not self._model.training or not torch.is_grad_enabled():
            return
        if self._num_calls == 0:
            self._began = time.monotonic()
        self._look()
        self._num_calls += 1
        is_early = self._helper is None and self._known is None
        if not is_early or self._num_calls <= _MOST_BEFORE_HELPER:
            self._random = torch.get_rng_state()

    def _after(self, outer: Any, args: Any, output: Any) -> Any:
        if self._random is None:
            return output
        if not torch.equal(self._random, torch.get_rng_state()):
            self._obstacle = "its passes draw from the CPU's generator, as what makes batches does"
        self._watch_backward(getattr(output, "loss", None))
        if pools(self._model):
            return output  # it has no padding, nor will it have
        return unpacked_output.watched(output, self._tell)

    def _watch_backward(self, loss: Any) -> None:
        """See whether gradients get gradients, which those of packed attention can't have."""

        def look(_: Any) -> None:
            if torch.is_grad_enabled():
                self._obstacle = "gradients of its gradients are asked for"

        if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
            loss.grad_fn.register_prehook(look)

    def _tell(self, field: str, reader: str) -> None:
        self._obstacle = unpacked_output.reads(reader, field)

    def _look(self) -> None:
        """See whether it is time to decide."""
        is_patient = config.current().patience != "off"
        if self._num_calls < (_BEFORE_HELPER if is_patient else 1):
            return
        if self._obstacle is not None:
            self._stay(self._obstacle)
        elif self._helper is None and self._known is None:
            self._start(is_patient)
        elif self._num_calls >= _WATCHED or not is_patient:
            heard = self._helper.answer if self._helper is not None else None
            answer = self._known or heard
            if answer is not None:
                self._hear(answer)

    def _start(self, is_patient: bool) -> None:
        if is_patient and time.monotonic() - self._began < self._least_run_s:
            return
        try:
            twin = pickle.dumps(packing_twin.describe(self._outer, self._model))
        except Unsupported as reason:
            self._stay(str(reason))
            return
        except Exception as error:  # whatever a configuration holds
            self._stay(f"its configuration can't be copied: {type(error).__name__}")
            return
        self._known = self._known_of(twin)
        if self._known is not None:
            if not is_patient:
                self._look()
            return
        self._helper = self._ready or self._new_helper(is_awaited=not is_patient)
        self._ready = None
        self._helper.ask(twin)
        if not is_patient:
            self._helper.wait()
            self._look()

    @functools.cached_property
    def _least_run_s(self) -> float:
        cores = cpu_affinity.of_rank(topology.discover().cores.usable)
        return 0.0 if cores > _SPARE_CORES else _HELPER_S / _LARGEST_SHARE

    def _known_of(self, twin: bytes) -> dict[str, Any] | None:
        """Find what an earlier run has found out about such a twin."""
        self._key = self._key_of(twin)
        return None if config.current().tune == "force" else guard.profile.find(self._key)

    def _key_of(self, twin: bytes) -> dict[str, Any]:
        facts = {
            "twin": hashlib.sha256(twin).hexdigest()[:16],
            "transformers": metadata.version("transformers"),
        }
        return guard.profile.key(f"{WHAT} {type(self._model).__name__}", facts, world_size=1)

    def _hear(self, answer: dict[str, Any]) -> None:
        found = answer.get("conventions")
        chosen = "padded" if found is None else "packed"
        entry = {"chosen": chosen, "reason": answer.get("reason", "its twin gives the same")}
        entry |= {} if found is None else {"conventions": found}
        if self._helper is not None:
            guard.profile.keep(self._key, entry)
        if found is None:
            self._stay(entry["reason"])
            return
        self.close()
        decisions.record(WHAT, "packed", f"{type(self._model).__name__}: {entry['reason']}")
        self._then(
            self._outer,
            self._model,
            Conventions(**{**found, "per_token": tuple(found["per_token"])}),
        )

    def _stay(self, reason: str) -> None:
        self.close()
        decisions.record(WHAT, "padded", f"{type(self._model).__name__}: {reason}")
