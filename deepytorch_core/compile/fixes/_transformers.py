"""Questions that fixes for transformers' models ask."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_transformers(model: nn.Module) -> bool:
    """Whether it is a model of transformers, which is not imported for that."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def caches(model: Any) -> bool:
    """Whether a model of transformers returns a cache unless it is told not to."""
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(getattr(configuration, "use_cache", False) for configuration in (config, text))
