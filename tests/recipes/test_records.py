# SPDX-License-Identifier: Apache-2.0
"""Data in tables, folders and plain texts."""

import csv
import io
import json

import datasets
import pytest

from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.data.chat import encode
from deepytorch.recipes.data.conversations import has_empty_answer, read_conversations
from deepytorch.recipes.data.instructions import TextOptions
from deepytorch.recipes.data.text import IGNORED_LABEL, byte_tokenizer


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl", "folder", "saved"])
def test_tables_are_read_as_they_are_written(tmp_path, kind):
    """Fields of a table stay texts: 007 keeps its zeros, and NA is no gap."""
    rows = [{"instruction": "Say, it.", "output": "007"}, {"instruction": "Or?", "output": "NA"}]
    path = tmp_path / f"data.{kind}"
    if kind in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.DictWriter(
            text, ["instruction", "output"], delimiter="\t" if kind == "tsv" else ","
        )
        writer.writeheader()
        writer.writerows(rows)
        path.write_text(text.getvalue())
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    else:
        path = tmp_path / "folder" if kind == "folder" else path
        file = path / "part.parquet" if kind == "folder" else path
        file.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(file)
    found = read_conversations(path).found
    assert [conversation.messages[-1].content for conversation in found] == ["007", "NA"]
    assert str(path) in found[0].where


def test_texts_are_trained_as_they_are(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Once upon a time\n\nThe end\n")
    found = read_conversations(path).found
    assert [conversation.messages[0].content for conversation in found] == [
        "Once upon a time",
        "",
        "The end",
    ]
    assert has_empty_answer(found[1])
    tokenizer = byte_tokenizer()
    example, *_ = encode(found[0], tokenizer, TextOptions(name="test"))
    assert tokenizer.decode(example.labels[1:]) == "Once upon a time</s>"
    assert example.labels[0] == IGNORED_LABEL


def test_a_folder_of_other_files_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(RecipeError, match="files of several kinds"):
        read_conversations(tmp_path)
    (tmp_path / "c").mkdir()
    with pytest.raises(RecipeError, match="has no data files"):
        read_conversations(tmp_path / "c")
