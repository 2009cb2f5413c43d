"""Batches: which samples go where, how they are laid out, and what need not be computed twice."""

from deepytorch_core.data.balance import TokenBalancedBatchSampler as TokenBalancedBatchSampler
from deepytorch_core.data.cache import EncoderCache as EncoderCache
from deepytorch_core.data.cache import posterior as posterior
from deepytorch_core.data.cache import sample_posterior as sample_posterior
from deepytorch_core.data.collator import PaddingFreeCollator as PaddingFreeCollator
from deepytorch_core.data.packing import Packing as Packing
from deepytorch_core.data.packing import full as full
from deepytorch_core.data.packing import plan as plan
from deepytorch_core.data.partition import TokenCost as TokenCost
from deepytorch_core.data.shapes import Shapes as Shapes
from deepytorch_core.data.varlen_attention import varlen_attention as varlen_attention
