"""Rows of token ids become tensors by numpy, as fast as they are copied.

transformers makes tensors of lists number by number, in its collate functions as in its tokenizers.
That takes some milliseconds a batch, in which the GPU may have nothing to do. Here rows of whole
numbers are converted before, to the very tensors that transformers makes of them; everything else
is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepytorch_core.base import config
from deepytorch_core.base.patching import Patches

_Function = Callable[..., Any]

_WHY = "rows of token ids become tensors by numpy"
_OPTION = "DEEPYTORCH_COMPILE=off"
# Fewer numbers are converted as fast either way.
_LEAST = 256


def of_tokenizers(module: Any, patches: Patches) -> None:
    """Put it in place in `transformers.tokenization_utils_base`."""
    patches.replace(
        module.BatchEncoding, "convert_to_tensors", _converting, why=_WHY, option=_OPTION
    )


def of_collates(module: Any, patches: Patches) -> None:
    """Put it in place in `transformers.data.data_collator`."""
    patches.replace(module, "torch_default_data_collator", _collating, why=_WHY, option=_OPTION)


def _converting(original: _Function) -> _Function:
    def convert_to_tensors(
        encoding: Any, tensor_type: Any = None, prepend_batch_axis: bool = False
    ) -> Any:
        is_torchs = getattr(tensor_type, "value", tensor_type) == "pt"
        if is_torchs and not prepend_batch_axis and config.current().compile != "off":
            for name, rows in list(encoding.items()):
                array = _array(rows)
                if array is not None:
                    encoding[name] = torch.from_numpy(array).clone()
        return original(encoding, tensor_type, prepend_batch_axis)

    return convert_to_tensors


def _collating(original: _Function) -> _Function:
    def torch_default_data_collator(features: Any) -> Any:
        is_plain = isinstance(features, list) and all(type(feature) is dict for feature in features)
        if not is_plain or not features or config.current().compile == "off":
            return original(features)
        names = [name for name, row in features[0].items() if _is_row(name, row)]
        columns = {
            name: _array([feature[name] for feature in features])
            for name in names
            if all(name in feature for feature in features)
        }
        # Rows that are tensors are stacked, which copies them once more.
        tensors = {
            name: torch.from_numpy(array) for name, array in columns.items() if array is not None
        }
        rows = [
            {**feature, **{name: array[number] for name, array in tensors.items()}}
            for number, feature in enumerate(features)
        ]
        return original(rows)

    return torch_default_data_collator


def _is_row(name: str, row: Any) -> bool:
    """Whether transformers makes a tensor of such rows as of any other numbers."""
    return type(row) is list and name not in ("label", "label_ids")


def _array(rows: Any) -> np.ndarray[Any, Any] | None:
    """Rows [batch, width] of whole numbers, int64; None for everything else."""
    if type(rows) is not list or not rows or any(type(row) is not list for row in rows):
        return None
    width = len(rows[0])
    if width * len(rows) < _LEAST or any(len(row) != width for row in rows):
        return None
    if type(rows[0][0]) is not int:
        return None
    try:
        array = np.asarray(rows)
    except (ValueError, TypeError, OverflowError):
        return None
    is_matrix = array.dtype == np.int64 and array.shape == (len(rows), width)
    return array if is_matrix else None
