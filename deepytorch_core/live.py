"""Figures for frameworks' loggers: see `deepytorch_core.report.live`."""

from deepytorch_core.report.live import Figures

__all__ = ["Figures"]
