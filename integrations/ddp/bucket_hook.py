"""DDP's gradients sent as bfloat16; annotations here are types, as DDP compares them."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from deepytorch.integrations.common import groups

_FULL_PRECISION = (torch.float32, torch.float64)


def average_as_bf16(
    state: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group `state`; float32 and float64 ones travel as bfloat16.

    They are divided before they are rounded. On the CPU deepytorch adds the ranks' values in
    float32 and rounds once. So the error is that of two roundings whatever the number of ranks.
    """
    gradients = bucket.buffer()
    sent = gradients
    if gradients.layout == torch.strided and gradients.dtype in _FULL_PRECISION:
        sent = groups.buffer(gradients.numel(), gradients, torch.bfloat16, state)
        torch.div(gradients, state.size(), out=sent)
    else:
        sent.div_(state.size())
    work = dist.all_reduce(sent, group=state, async_op=True)
    assert work is not None

    def widen(reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        (received,) = reduced.value()
        return received if sent is gradients else gradients.copy_(received)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return future
