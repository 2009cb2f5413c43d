# SPDX-License-Identifier: Apache-2.0
"""The template that a chat model is trained with, where TRL has one for the model's own.

TRL's training templates are the models' own with `{% generation %}` marks on what the assistant
says, and without words that depend on later turns. The tokenizer keeps its own template: that is
what the trained model is talked with.
"""

import functools
from typing import Any

_MARK = "\ue000"  # a private character, so no template has it


def training_template(tokenizer: Any) -> str | None:
    """TRL's training template for a tokenizer; None where its own is to be taken."""
    template = tokenizer.chat_template
    return _known(tokenizer, template) if isinstance(template, str) else None


@functools.lru_cache(maxsize=8)
def _known(tokenizer: Any, template: str) -> str | None:
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError:
        return None
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except Exception:  # a ValueError where TRL has none; a template computes, so anything else too
        return None
    return found


def wants_parts(tokenizer: Any, template: str | None) -> bool:
    """Whether a template reads texts as lists of parts alone, as those of models that see do."""
    return _wants_parts(tokenizer, template or tokenizer.chat_template)


@functools.lru_cache(maxsize=8)
def _wants_parts(tokenizer: Any, template: Any) -> bool:
    if not isinstance(template, str):
        return False

    def shows(content: Any) -> bool:
        turns = [{"role": "user", "content": content}]
        try:
            text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
        except Exception:  # a template computes, so anything may go wrong in it
            return False
        return _MARK in text

    return not shows(_MARK) and shows(in_parts(_MARK))


def in_parts(text: str) -> list[dict[str, str]]:
    """A text as OpenAI's list of parts."""
    return [{"type": "text", "text": text}]
