# SPDX-License-Identifier: Apache-2.0
"""Tokens and marks of all templates that TRL trains with are TRL's own."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.data import training_template
from deepytorch.recipes.data.chat import encode, prompt_of
from deepytorch.recipes.data.conversations import Conversation, Message
from deepytorch.recipes.data.instructions import TextOptions
from deepytorch.recipes.data.text import IGNORED_LABEL, byte_tokenizer

trl = pytest.importorskip("trl", minversion="1.16")
from trl.data_utils import prepare_multimodal_messages  # noqa: E402

FOLDER = Path(trl.__file__).parent / "chat_templates"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*_training.jinja"))
PARTS_ALONE = {"idefics3", "llava_next", "smolvlm"}

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALLING = Message("assistant", "", {"tool_calls": [CALL]})
RESULT = Message("tool", "3", {"name": "add"})
ASKED = Message("user", "How much is 1 + 2?")
THOUGHTFUL = Message("assistant", "It is 3.", {"reasoning_content": "One more than 2."})

CONVERSATIONS = {
    "two turns": (
        Conversation((ASKED, Message("assistant", "3"), ASKED, Message("assistant", "3"))),
        (),
    ),
    "thoughts": (Conversation((ASKED, THOUGHTFUL)), ("reasoning_content",)),
    "a call": (
        Conversation((ASKED, CALLING, RESULT, Message("assistant", "It is 3.")), TOOLS),
        ("tools", "tool_calls"),
    ),
    "a call and thoughts": (
        Conversation(
            (
                ASKED,
                replace(CALLING, extras={**CALLING.extras, "reasoning_content": "A sum."}),
                RESULT,
                THOUGHTFUL,
            ),
            TOOLS,
        ),
        ("tools", "tool_calls", "reasoning_content"),
    ),
}


def tokenizer_of(name):
    """The model's own template, with what looks like its special tokens as tokens."""
    template = (FOLDER / name.replace("_training", "")).read_text()
    tokenizer = byte_tokenizer()
    special = set(re.findall(r"<[^<>{}\s\"']+>|\[/?[A-Z_]+\]", template))
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special)})
    tokenizer.chat_template = template
    return tokenizer


def ours(tokenizer, conversation):
    example = encode(conversation, tokenizer, TextOptions(name="t", max_length=100_000)).example
    return [
        (token, label != IGNORED_LABEL)
        for token, label in zip(example.input_ids, example.labels, strict=True)
    ]


def theirs(tokenizer, name, conversation, leaving_out=()):
    """As TRL's SFTTrainer encodes with assistant_only_loss."""
    turns = [
        {key: value for key, value in message.for_template().items() if key not in leaving_out}
        for message in conversation.messages
    ]
    if name.removesuffix("_training.jinja") in PARTS_ALONE:
        turns = prepare_multimodal_messages(turns)
    options = {
        key: option for key, option in conversation.options.items() if key not in leaving_out
    }
    found = tokenizer.apply_chat_template(
        turns,
        chat_template=(FOLDER / name).read_text(),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **options,
    )
    return list(zip(found["input_ids"], map(bool, found["assistant_masks"]), strict=True))


def test_trl_has_as_many_templates_as_are_tried():
    assert len(TEMPLATES) >= 31


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_marks_are_trls(name, kind):
    tokenizer, (conversation, fields) = tokenizer_of(name), CONVERSATIONS[kind]
    try:
        found = ours(tokenizer, conversation)
    except RecipeError as error:
        _check_refusal(error, tokenizer, name, conversation, fields)
        return
    assert found == theirs(tokenizer, name, conversation)
    assert any(marked for _, marked in found)


def _check_refusal(error, tokenizer, name, conversation, fields):
    """TRL's template refuses it too, or has no place for what the message names."""
    left_out = re.search(r'leaves out (?:call \d of )?"(\w+)"', str(error))
    if left_out is None:
        with pytest.raises(Exception, match="."):
            theirs(tokenizer, name, conversation)
        return
    assert left_out[1] in fields
    with_it = theirs(tokenizer, name, conversation)
    assert with_it == theirs(tokenizer, name, conversation, leaving_out=(left_out[1],))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_trained_model_is_talked_with_in_its_own_words(name):
    tokenizer = tokenizer_of(name)
    turns = [{"role": "user", "content": ASKED.content}]
    if name.removesuffix("_training.jinja") in PARTS_ALONE:
        turns = prepare_multimodal_messages(turns)
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt_of(Conversation((ASKED, Message("assistant", "3"))), tokenizer) == prompt


def test_without_trl_marks_show_where_answers_lie(monkeypatch):
    conversation, _ = CONVERSATIONS["two turns"]
    tokenizer = tokenizer_of("qwen2_5_training.jinja")

    def answers():
        marked = ours(tokenizer, conversation)
        text = tokenizer.decode([token if is_marked else newline for token, is_marked in marked])
        return [line for line in text.split("\n") if line]

    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    expected = answers()
    monkeypatch.setattr(training_template, "_known", lambda tokenizer, template: None)
    assert answers() == expected == ["3<|im_end|>", "3<|im_end|>"]
