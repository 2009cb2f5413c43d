# SPDX-License-Identifier: Apache-2.0
"""Causal language models from a hub id or a path, in Hugging Face's own formats."""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from rich.panel import Panel
from rich.text import Text
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.hub import loading_options, reason, whole_files
from deepytorch.recipes.base.run import console
from deepytorch.recipes.data.chat import Conversation, prompt_of

# Wrong files, wrong shapes, a configuration that contradicts itself.
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, StrictDataclassError)

_POSITION_TABLES = ("position_embeddings", "embed_positions", "position_embedding", "wpe")


def load_tokenizer(model: str, *, causal: bool = True) -> Any:
    """The tokenizer of a hub id or a checkpoint path, with a token to pad with.

    Raises RecipeError when it cannot be read, or lacks the end token that a causal model learns.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, **loading_options(model))
    except _LOADING_ERRORS as error:
        raise RecipeError(_cannot_load("tokenizer", model, error)) from error
    if causal and tokenizer.eos_token_id is None:
        raise RecipeError(f"the tokenizer of model={model} has no end token to train the model on")
    if tokenizer.pad_token_id is None:
        # Labels are masked by position, so even a token that ends texts is safe here; others who
        # load the tokenizer may mask by id, so it is the last choice.
        pad_token = tokenizer.unk_token or tokenizer.eos_token or tokenizer.sep_token
        if pad_token is None:
            raise RecipeError(f"the tokenizer of model={model} has no token to pad with: add one")
        tokenizer.pad_token = pad_token
    return tokenizer


def load_model(model: str, tokenizer: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The causal language model of a hub id or a path, in ``dtype``.

    Raises RecipeError when it cannot be read, has fewer embeddings than the tokenizer tokens, or
    does not predict the next token.
    """
    loaded = load_with(AutoModelForCausalLM, model, tokenizer, dtype)
    if not _predicts_the_next_token(loaded):
        raise RecipeError(
            f"model={model} is a {type(loaded).__name__} that does not predict each token from "
            "those before it: use a model made to continue texts, such as Llama, Qwen or GPT"
        )
    return loaded


@torch.no_grad()
def _predicts_the_next_token(model: Any) -> bool:
    """Whether its loss is the cross-entropy of each next token, sum / total, and it sees none.

    The decoders of models that translate expect labels that are shifted already, for one, and BERT
    looks ahead unless its configuration says is_decoder.
    """
    shifts = "self.loss_function(" in inspect.getsource(type(model).forward)  # transformers' own
    if shifts and getattr(model.config, "is_decoder", True):
        return True
    ids = torch.arange(8)[None] % model.get_input_embeddings().weight.shape[0]
    total = torch.tensor(100.0)
    output = model(input_ids=ids, labels=ids, num_items_in_batch=total)
    logits = output.logits[0, :-1].float()
    wanted = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / total
    if output.loss is None or not torch.allclose(output.loss.float(), wanted, rtol=0.01):
        return False
    ids[0, -1] = 0
    return torch.allclose(model(input_ids=ids).logits[0, :-1].float(), logits, atol=1e-6)


def refuse_beyond_positions(model: Any, longest: int) -> None:
    """RecipeError if an example of ``longest`` tokens has more than the model has positions.

    Where these are a table's rows; computed ones, as rotary ones are, have no end.
    """
    tables = [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES
    ]
    tables += [  # GPT-J's
        len(table)
        for name, table in model.named_buffers()
        if table.ndim == 2 and name.rpartition(".")[2] in _POSITION_TABLES
    ]
    told = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    positions = min([*tables, told])
    if tables and longest > positions:
        raise RecipeError(
            f"an example has {longest} tokens, and {type(model).__name__} has {positions} "
            f"positions: set max_length={positions}"
        )


def load_with(
    auto_class: Any, model: str, tokenizer: Any, dtype: torch.dtype = torch.float32
) -> Any:
    """Return what ``auto_class`` of transformers makes of ``model``; see `load_model`."""
    with whole_files(Path(model)):
        try:
            loaded: Any = auto_class.from_pretrained(model, dtype=dtype, **loading_options(model))
        except _LOADING_ERRORS as error:
            raise RecipeError(_cannot_load("model", model, error)) from error
    if getattr(loaded, "_hf_peft_config_loaded", False):
        # Its weights would be frozen, and a new adapter would take their place.
        raise RecipeError(
            f"model={model} is an adapter, which would be lost: take the whole model with the "
            "adapter in it, as merge_adapter=true saves it"
        )
    num_rows = loaded.get_input_embeddings().weight.shape[0]
    if num_rows < len(tokenizer):
        raise RecipeError(
            f"model={model} has {num_rows} embeddings but its tokenizer {len(tokenizer)} tokens: "
            "they do not belong together"
        )
    return loaded


def _cannot_load(what: str, model: str, error: Exception) -> str:
    return (
        f"cannot load the {what} of model={model}: {reason(error)} "
        "(a hub id needs a network or a cached copy; a path needs a Hugging Face checkpoint folder)"
    )


def save_checkpoint(model: Any, tokenizer: Any, path: Path) -> None:
    """Write safetensors, configuration and tokenizer: from_pretrained(path) loads them."""
    bars: Any = logging
    bars.disable_progress_bar()  # at the end of training it would read as another training bar
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def print_sample(
    model: Any, tokenizer: Any, conversation: Conversation, num_tokens: int, path: Path
) -> None:
    """Print, and write to ``path``, what the model answers to a question left out of training.

    By then the model is trained and saved, so a sample that fails is only said.
    """
    try:
        prompt = prompt_of(conversation, tokenizer)
        if not prompt:
            raise RecipeError("the conversation left out of training has no question")
        prompt, answer = _sample(model, tokenizer, prompt, num_tokens)
        path.write_text(f"{prompt}{answer}\n", encoding="utf-8")
    except Exception as error:
        console.print(f"sample      none: {str(error) or type(error).__name__}", highlight=False)
        return
    text = Text(prompt, style="dim").append(answer, style="bold not dim")
    console.print(Panel(text, title="sample: the answer to a question left out of training"))


def _sample(model: Any, tokenizer: Any, prompt: str, num_tokens: int) -> tuple[str, str]:
    """Return the prompt, cut if the model has few positions, and the answer to it."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    positions = getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    room = max(1, positions - num_tokens)
    if ids.shape[1] > room:
        ids = ids[:, -room:]
        prompt = tokenizer.decode(ids[0])
    ids = ids.to(model.device)
    was_training = model.training
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=min(num_tokens, positions - room),
            do_sample=True,  # a young model repeats itself when it always takes the likeliest
            temperature=0.7,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    model.train(was_training)
    return prompt, tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
