"""SyncBatchNorm: statistics of the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from deepytorch.integrations.common.horovod_common import ReduceOp
from deepytorch.integrations.horovod._world import ProcessSet, global_process_set
from deepytorch.integrations.horovod.mpi_ops import allreduce


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the batches of all ranks, on any device.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of `torch.nn.BatchNorm2d`.
        process_set: the ranks that take part.

    Takes (batch, num_features, ...); batches may differ between ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input, of the same shape."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or self.process_set.size() == 1:
            return super().forward(input)
        dims = [0, *range(2, input.dim())]
        values = input if input.dtype in (torch.float32, torch.float64) else input.float()
        count = values.new_tensor([values.numel() / values.shape[1]])
        total = self._sum(torch.cat([values.sum(dims), count]))
        mean, count = total[:-1] / total[-1], total[-1].detach()
        shape = [1, -1] + [1] * (input.dim() - 2)
        centred = values - mean.view(shape)
        variance = self._sum(centred.square().sum(dims)) / count
        if self.training and self.track_running_stats:
            self._update(mean.detach(), variance.detach(), count)
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return allreduce(tensor, op=ReduceOp.Sum, process_set=self.process_set)

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
