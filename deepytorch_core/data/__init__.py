"""Batches: which samples go where, how they are laid out, and what need not be computed twice."""

from deepytorch_core.data.balance import TokenBalancedBatchSampler as TokenBalancedBatchSampler
from deepytorch_core.data.partition import TokenCost as TokenCost
