# SPDX-License-Identifier: Apache-2.0
"""Large data is encoded once: by all ranks together, and not again in a later run."""

import pytest
import torch

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data import encoding
from deepytorch.recipes.data.chat import encode_one
from deepytorch.recipes.data.conversations import Conversation, Message
from deepytorch.recipes.data.encoding import encoded_by_all
from deepytorch.recipes.data.instructions import TextOptions
from deepytorch.recipes.qwen_lora import chat_tokenizer
from deepytorch_core.testing import spawn_ranks

CPU = torch.device("cpu")
ALONE = Process(0, 1, CPU)
OPTIONS = TextOptions(name="t", max_length=40)


def conversations(number=7):
    return [
        Conversation(
            (Message("user", f"{place}?"), Message("assistant", place * "x")), where=f"{place}"
        )
        for place in range(1, number + 1)
    ]


@pytest.fixture
def times(monkeypatch, tmp_path):
    """How often a conversation is encoded; all data counts as large."""
    monkeypatch.setenv("DEEPYTORCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(encoding, "_LARGE", 1)
    counted = []

    def counting(*arguments):
        counted.append(arguments)
        return encode_one(*arguments)

    monkeypatch.setattr(encoding, "encode_one", counting)
    return counted


def test_a_later_run_finds_what_was_encoded(times, tmp_path):
    tokenizer = chat_tokenizer()
    first = encoded_by_all(conversations(), tokenizer, OPTIONS, ALONE)
    assert first == [
        encode_one(conversation, tokenizer, OPTIONS) for conversation in conversations()
    ]
    assert len(times) == 7
    assert encoded_by_all(conversations(), chat_tokenizer(), OPTIONS, ALONE) == first
    assert len(times) == 7
    (kept,) = (tmp_path / "recipes").iterdir()
    kept.write_bytes(b"damaged")
    assert encoded_by_all(conversations(), tokenizer, OPTIONS, ALONE) == first
    assert len(times) == 14


@pytest.mark.parametrize("changed", ["data", "length", "template"])
def test_other_data_or_templates_are_encoded_anew(times, changed):
    tokenizer, data, options = chat_tokenizer(), conversations(), OPTIONS
    encoded_by_all(data, tokenizer, options, ALONE)
    if changed == "data":
        data[3] = Conversation((Message("user", "?"), Message("assistant", "other")))
    elif changed == "length":
        options = TextOptions(name="t", max_length=41)
    else:
        tokenizer.chat_template += " "
    encoded_by_all(data, tokenizer, options, ALONE)
    assert len(times) == 14


def _share(rank, world_size, is_wrong):
    process = Process(rank, world_size, CPU)
    data, encoded = conversations(), []
    if is_wrong:
        data[5] = Conversation((Message("tool", "?", {"tool_calls": [{}]}),), where="record 5")
        data[5] = Conversation(data[5].messages, {"tools": [{}]}, where="record 5")

    def counting(*arguments):
        encoded.append(arguments)
        return encode_one(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "encode_one", counting)
        try:
            found = encoded_by_all(data, chat_tokenizer(), OPTIONS, process)
        except RecipeError as error:
            return str(error)
    assert found == [encode_one(conversation, chat_tokenizer(), OPTIONS) for conversation in data]
    return len(encoded)


def test_ranks_share_the_work():
    assert spawn_ranks(_share, 2, False, backend="gloo") == [4, 3]


def test_an_error_of_one_rank_is_everyones():
    first, second = spawn_ranks(_share, 2, True, backend="gloo")
    assert first == second
    assert first.startswith("rank 1: record 5: ")
