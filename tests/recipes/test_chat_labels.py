# SPDX-License-Identifier: Apache-2.0
"""Tests of the trained tokens of a conversation, and of the sample printed after training."""

import random
import string

import pytest
import torch
from transformers import (
    BertTokenizerFast,
    ByT5Tokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    tokenization_utils_base,
)

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.data.chat import encode, prompt_of
from deepytorch.recipes.data.conversations import Conversation, Message
from deepytorch.recipes.data.instructions import TextOptions
from deepytorch.recipes.data.text import IGNORED_LABEL, byte_tokenizer
from deepytorch.recipes.models.language import load_tokenizer, print_sample
from deepytorch.recipes.qwen_lora import chat_tokenizer

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
# The end of a turn is not the tokenizer's end token, which stands behind the last turn alone.
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# Thoughts of all answers but the last are dropped.
THOUGHTFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ parts[0] | replace('<think>', '') "
    "| trim if parts | length > 1 else '' }}\n</think>\n\n{% endif %}"
    "{{ parts[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: it takes newlines off the beginning of the last answer, and has a place for thoughts.
UNTHINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{{ m.content.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = Message("user", "Is it?")


def with_template(template, *tokens):
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return tokenizer


def trained(tokenizer, *messages):
    """The texts that are trained, one for each answer."""
    options = TextOptions(name="test", max_length=10_000)
    example = encode(Conversation(messages), tokenizer, options).example
    runs, before = [], IGNORED_LABEL
    for label in example.labels:
        if label != IGNORED_LABEL:
            runs = runs if before != IGNORED_LABEL else [*runs, []]
            runs[-1].append(label)
        before = label
    return [tokenizer.decode(run) for run in runs]


def answers():
    """Answers of which the templates say some parts themselves, and others."""
    chance = random.Random(7)
    marks = "<|im_start|>assistant\n<|im_end|>[/INST]<|end|>user"
    cut = [sorted(chance.sample(range(len(marks)), 2)) for _ in range(12)]
    parts = [marks[start:end].replace("<|", "").replace("|>", "").strip() for start, end in cut]
    noise = ["".join(chance.choices(string.printable, k=chance.randint(1, 9))) for _ in range(12)]
    return [part for part in ["a", "d", "start", "I", "Yes", *parts, *noise] if part.strip()]


@pytest.mark.parametrize(
    ("tokenizer", "end"),
    [
        (chat_tokenizer(), "<|im_end|>"),
        (with_template(LLAMA2, "[INST]", "[/INST]", "</s>"), "</s>"),
        (with_template(PHI3, "<|end|>", "<|user|>", "<|assistant|>"), "<|end|>"),
    ],
    ids=["chatml", "llama2", "phi3"],
)
def test_labels_lie_on_the_answers_whatever_they_say(tokenizer, end):
    said = answers()
    for first, second in zip(said, reversed(said), strict=True):
        turns = (QUESTION, Message("assistant", first), QUESTION, Message("assistant", second))
        found = [text.removesuffix(end).strip() for text in trained(tokenizer, *turns)]
        assert found == [first.strip(), second.strip()]
        assert all(text.endswith(end) for text in trained(tokenizer, *turns))


def test_an_empty_answer_trains_its_own_end_alone():
    tokenizer = chat_tokenizer()
    turns = (QUESTION, Message("assistant", ""), QUESTION, Message("assistant", "Yes"))
    assert trained(tokenizer, *turns) == ["<|im_end|>", "Yes<|im_end|>"]
    options = TextOptions(name="test", max_length=10_000)
    labels = encode(Conversation(turns), tokenizer, options).example.labels
    first = next(place for place, label in enumerate(labels) if label != IGNORED_LABEL)
    prompt = prompt_of(Conversation(turns[:2]), tokenizer)
    assert first == len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def test_the_mark_of_the_next_turn_is_no_end_token():
    tokenizer = with_template("{% for m in messages %}<|im_start|>{{ m.content }}\n{% endfor %}")
    assert trained(tokenizer, Message("assistant", "Hi"), QUESTION) == ["Hi"]


def test_an_answer_that_the_template_takes_apart_is_what_follows_the_prompt():
    tokenizer = with_template(THOUGHTFUL)
    turns = (QUESTION, Message("assistant", "Yes"), QUESTION)
    thoughts = Message("assistant", "<think>so</think>No")
    assert trained(tokenizer, QUESTION, thoughts) == ["<think>\nso\n</think>\n\nNo<|im_end|>"]
    assert trained(tokenizer, *turns, Message("assistant", "No")) == [
        "Yes<|im_end|>",
        "No<|im_end|>",
    ]
    with pytest.raises(RecipeError, match="chat template changes what the assistant says"):
        trained(tokenizer, QUESTION, thoughts, *turns)


@pytest.mark.parametrize("answer", ["\nYes", "\n\n Yes ", "Yes\n"])
def test_a_template_that_takes_newlines_off_has_its_own_words_not_trained(answer):
    tokenizer = with_template(UNTHINKING)
    assert trained(tokenizer, QUESTION, Message("assistant", answer)) == [
        answer.lstrip("\n") + "<|im_end|>"
    ]


@pytest.fixture
def few_positions():
    torch.manual_seed(0)
    size = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=300, **size))


@pytest.mark.parametrize("make_tokenizer", [byte_tokenizer, chat_tokenizer])
@pytest.mark.parametrize("asked", [(), (Message("system", "Be short."),)])
def test_a_conversation_without_a_question_fails_no_run(
    make_tokenizer, asked, few_positions, tmp_path, capsys
):
    tokenizer = make_tokenizer()
    turns = (*asked, Message("assistant", "Hi"))
    assert bool(prompt_of(Conversation(turns), tokenizer)) == bool(asked)
    print_sample(few_positions, tokenizer, Conversation(turns), 3, tmp_path / "sample.txt")
    said = "none: the conversation left out of training has no question" in capsys.readouterr().out
    assert said != bool(asked)
    assert (tmp_path / "sample.txt").exists() == bool(asked)


@pytest.mark.parametrize("num_tokens", [8, 100])
def test_a_long_prompt_is_cut_from_the_left(few_positions, num_tokens, tmp_path):
    turns = (Message("user", "x" * 200), Message("assistant", "Hi"))
    path = tmp_path / "sample.txt"
    print_sample(few_positions, byte_tokenizer(), Conversation(turns), num_tokens, path)
    kept = "### Response:\n"[-max(1, 32 - num_tokens) :]
    assert kept in path.read_text()
    assert "### Instruction" not in path.read_text()


def test_a_sample_that_fails_is_a_line(few_positions, tmp_path, capsys):
    turns = (QUESTION, Message("assistant", "Hi"))
    print_sample(
        few_positions, byte_tokenizer(), Conversation(turns), 3, tmp_path / "no" / "folder"
    )
    assert "sample      none: [Errno 2]" in capsys.readouterr().out


def test_a_masked_model_needs_no_end_token(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="has no end token"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), causal=False).pad_token == "[PAD]"


@pytest.mark.parametrize(
    ("missing", "pad"), [((), "[UNK]"), (("unk",), "</s>"), (("unk", "eos"), "[SEP]")]
)
def test_padding_falls_back_to_another_special_token(tmp_path, missing, pad):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"unk_token": "[UNK]", "sep_token": "[SEP]"})
    for name in ("pad", *missing):
        setattr(tokenizer, f"{name}_token", None)
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), causal=False).pad_token == pad


def plain(*turns, **others):
    """The text of a model without a chat template, and what of it is trained."""
    tokenizer = byte_tokenizer()
    options = TextOptions(name="test", max_length=10_000, **others)
    conversation = Conversation(tuple(Message(*turn) for turn in turns))
    example = encode(conversation, tokenizer, options).example
    labels = [label for label in example.labels if label != IGNORED_LABEL]
    return tokenizer.decode(example.input_ids), tokenizer.decode(labels)


ASKED = "### Instruction:\nq\n\n### Response:\n"


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ("system: S, user: q, assistant: a", f"S\n\n{ASKED}a</s>"),
        ("system: S, system: T, user: q, assistant: a", f"S\n\nT\n\n{ASKED}a</s>"),
        ("system: S, assistant: a, user: q, assistant: a", f"S\n\na</s>{ASKED}a</s>"),
        ("user: q, system: S, assistant: a", f"{ASKED}S\n\na</s>"),
        ("user: q, assistant: a, system: S", f"{ASKED}a</s>S\n\n"),
    ],
)
def test_without_a_template_every_turn_has_its_place(turns, text):
    spoken = [tuple(turn.split(": ")) for turn in turns.split(", ")]
    assert plain(*spoken) == (f"<s>{text}", "a</s>" * turns.count("assistant"))


def test_a_second_answer_is_asked_for_behind_the_first():
    asked = (Message("user", "q"), Message("assistant", "first"), Message("assistant", "second"))
    assert prompt_of(Conversation(asked), byte_tokenizer()) == f"<s>{ASKED}first"


@pytest.mark.parametrize("expression", ["'a' + 1", "1 // 0", "messages[99].role.x", "nobody(1)"])
def test_whatever_fails_in_a_template_is_one_sentence(expression):
    tokenizer = with_template("{{ " + expression + " }}")
    with pytest.raises(RecipeError, match="chat template refuses the conversation") as failure:
        trained(tokenizer, QUESTION, Message("assistant", "Yes"))
    assert "\n" not in str(failure.value)


def test_a_tokenizer_without_offsets_trains_whole_conversations_only():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    turns = (QUESTION, Message("assistant", "Yes"))
    with pytest.raises(RecipeError, match="does not say where in the text its tokens lie"):
        trained(tokenizer, *turns)
    whole = TextOptions(name="test", train_on_prompt=True)
    example = encode(Conversation(turns), tokenizer, whole).example
    assert example.labels == example.input_ids
    assert tokenizer.decode(example.labels) == "Is it?Yes"


@pytest.mark.parametrize("template", [None, chat_tokenizer().chat_template])
def test_a_text_that_is_cut_brings_no_warning_of_its_length(template, monkeypatch):
    tokenizer, said = byte_tokenizer(), []
    tokenizer.model_max_length, tokenizer.chat_template = 8, template
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", said.append)
    options = TextOptions(name="test", max_length=8)
    turns = (QUESTION, Message("assistant", "a rather long answer"))
    encode(Conversation(turns), tokenizer, options)
    assert said == []
