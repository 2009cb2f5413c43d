"""The loss that a loop of one's own tells: see `deepytorch_core.metering.step_timer`."""

from deepytorch_core.metering.step_timer import note_loss

__all__ = ["note_loss"]
