# SPDX-License-Identifier: Apache-2.0
"""The texts of bert_mlm: how a file is read, what is cut and left out, and what may be hidden."""

import random

import pytest
import torch
from transformers import BertTokenizerFast

from deepytorch.recipes import bert_mlm
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data.text import IGNORED_LABEL

UNKNOWN, CLS, SEP, THE = 1, 2, 3, 5


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    return BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=4)


def prepare(tmp_path, text, capsys, **options):
    """The task of a text file, and what is printed of it."""
    path = tmp_path / "texts.txt"
    path.write_bytes(text.encode())
    config = bert_mlm.Config(**{"data": str(path), "batch_size": 1, **options})
    task = bert_mlm.prepare(config, Process(0, 1, torch.device("cpu")))
    return task, capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_texts_end_at_line_feeds_alone(tmp_path, encoding, end):
    texts = [f"a{mark}b" for mark in "\r\x0b\x0c\x1c\x85\u2028\u2029"]
    path = tmp_path / "texts.txt"
    path.write_bytes(end.join([*texts, "", " ", "last"]).encode(encoding))
    assert bert_mlm.read_texts(str(path)) == [*texts, "last"]
    path.write_bytes(end.encode(encoding))
    with pytest.raises(RecipeError, match="has no text"):
        bert_mlm.read_texts(str(path))


def test_what_is_cut_and_held_out_is_said(tmp_path, capsys):
    _, said = prepare(tmp_path, "ab\n" * 20, capsys, max_length=3)
    assert "data        18 texts, 54 tokens; 0 cut to max_length=3, 0 tokens lost; 2 held" in said
    assert "2 held out (held_out=32, but at most a tenth of the data)" in said
    assert "left out" not in said
    _, said = prepare(tmp_path, f"{'x' * 1005}\n" * 20, capsys, max_length=6, held_out=2)
    # The token in front of a text is one of six: five of a text's are left.
    assert "18 texts, 108 tokens; 18 cut to max_length=6, 18,000 tokens lost; 2 held out\n" in said


def test_a_single_text_is_trained_on_and_not_held_out(tmp_path, capsys):
    task, said = prepare(tmp_path, "alone", capsys)
    assert "1 texts" in said
    assert "none held out, as there is only one" in said
    assert task.held_out == []
    model = task.make_model()
    task.export(model, tmp_path)
    assert "alone" not in capsys.readouterr().out  # it shows the one text, with a part hidden
    assert "hidden tokens are right" in (tmp_path / "sample.txt").read_text()


def test_texts_of_special_tokens_alone_are_left_out_and_counted(tmp_path, capsys):
    _, said = prepare(tmp_path, "<s>\nab\n<pad></s>\nab\n", capsys)
    assert "1 texts, 3 tokens" in said
    assert "; 2 left out because only special tokens remain; 1 held out" in said
    with pytest.raises(RecipeError, match="no text has a token to hide within max_length=1"):
        prepare(tmp_path, "ab\nab", capsys, max_length=1)


def test_texts_are_cut_between_the_special_tokens(tokenizer, caplog):
    (piece,) = bert_mlm.encode_texts(["the the the the", "word"], tokenizer, 4)
    assert piece == bert_mlm.Piece([CLS, THE, THE, SEP], 2)
    assert not caplog.records  # the tokenizer's own line on texts that are too long
    for max_length in (2, 1):
        with pytest.raises(RecipeError, match=f"max_length={max_length}: all that is left are"):
            bert_mlm.encode_texts(["the the the"], tokenizer, max_length)


@pytest.mark.parametrize("ids", [[CLS, SEP], [CLS, UNKNOWN, SEP], [CLS, UNKNOWN, THE, SEP]])
def test_special_tokens_are_never_hidden(tokenizer, ids):
    for seed in range(20):
        example = bert_mlm.mask(ids, tokenizer, random.Random(seed))
        hidden = [place for place, label in enumerate(example.labels) if label != IGNORED_LABEL]
        assert hidden == ([2] if THE in ids else [])
        unhidden = [place for place in range(len(ids)) if place not in hidden]
        assert all(example.input_ids[place] == ids[place] for place in unhidden)
