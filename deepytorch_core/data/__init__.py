"""Batches: packing without padding, and the attention that packed batches need."""

from deepytorch_core.data.collator import PaddingFreeCollator as PaddingFreeCollator
from deepytorch_core.data.packing import Packing as Packing
from deepytorch_core.data.packing import plan as plan
from deepytorch_core.data.shapes import Shapes as Shapes
from deepytorch_core.data.varlen_attention import varlen_attention as varlen_attention
