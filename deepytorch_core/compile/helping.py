"""The time in which helpers compile a model's regions while its steps go on."""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch_core.base import console
from deepytorch_core.compile import outcome
from deepytorch_core.compile.ahead import Ahead
from deepytorch_core.compile.handover import Handover
from deepytorch_core.compile.region import CompiledRegion


class Helping:
    """Gives a model's graphs to helpers, and takes over what they have done.

    Args:
        helpers: at work.
        handover: the order in which parts are taken over.
        regions: the parts; helpers are given their next graphs.
        is_patient: whether no step may wait for a compiler. Graphs of later sizes are for helpers,
            too, then, and what they could not compile stays eager.
    """

    def __init__(
        self,
        helpers: Ahead,
        handover: Handover,
        regions: Sequence[CompiledRegion],
        *,
        is_patient: bool,
    ) -> None:
        self.is_loading = False
        """Whether the step that begins takes a part over."""
        self._helpers = helpers
        self._handover = handover
        self._regions = regions
        self._is_patient = is_patient
        helpers.start(len(regions))
        for region in regions:
            region.prepare(helpers)
            if is_patient:
                region.send_later(helpers)

    def unseen(self) -> list[str]:
        """The parts that no step has called since they are prepared."""
        return [region.region.name for region in self._regions if region.is_to_be_seen]

    def are_seen(self, answers: Sequence[bool], unseen: Sequence[str]) -> bool:
        """Whether helpers have all graphs that they will get; `answers` as `Handover` wants."""
        if not self._handover.are_seen(answers):
            return False
        for name in unseen:
            self._helpers.failed.setdefault(name, "no step has called it")
        return True

    def take_over(self) -> bool:
        """Take over the next part that is done, in the step that begins; False if none is left."""
        self.is_loading = False
        helpers = self._helpers
        prepared = {region.region.name: region for region in self._regions if region.is_prepared}
        if not prepared:
            return False
        part = self._handover.next_part(
            list(prepared), lambda name: helpers.is_late or helpers.is_done(name)
        )
        if part is None:
            return True
        if self._is_patient and part in helpers.failed:
            prepared[part].leave(helpers.failed[part])
        elif helpers.is_done(part):
            prepared[part].restart()
            self.is_loading = True
        else:
            prepared[part].leave(outcome.LATE)
        return True

    def end(self, what: str) -> None:
        """Say what they could not do for the decision `what`."""
        if not self._is_patient:
            self._helpers.close()
            for name, why in self._helpers.failed.items():
                console.say(f"{what}: {name} is compiled while the training waits: {why}")
        if late := sum(region.failure == outcome.LATE for region in self._regions):
            console.say(
                f"{what}: {late} of {len(self._regions)} parts run eagerly: helpers have not "
                "compiled them in time",
                level="warning",
            )

    def close(self) -> None:
        """Stop the helpers, whatever they do."""
        self._helpers.close()
