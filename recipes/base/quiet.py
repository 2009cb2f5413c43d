# SPDX-License-Identifier: Apache-2.0
"""No remarks of other libraries that a user of a recipe can do nothing about."""

import logging
import sys
import warnings

import torch.distributed as dist

_LIBRARIES = "transformers|peft|diffusers|accelerate|trl|datasets|huggingface_hub|deepspeed|torch"
_FUTURE = (FutureWarning, DeprecationWarning, PendingDeprecationWarning)


def quiet() -> None:
    """Leave out what libraries say of their own future versions, and what other ranks repeat.

    Nothing is left out where Python was told which warnings to show (-W, PYTHONWARNINGS).
    """
    if sys.warnoptions:
        return
    for kind in _FUTURE:
        warnings.filterwarnings("ignore", category=kind, module=rf"({_LIBRARIES})(\.|$)")
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if dist.get_node_local_rank(fallback_rank=0) > 0:
        warnings.simplefilter("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)


def _is_news(record: logging.LogRecord) -> bool:
    # Looked for by transformers when a model is saved, whatever trains it.
    return "Setting accelerator to CPU" not in record.getMessage()
