# SPDX-License-Identifier: Apache-2.0
"""The recipe dpo: pairs in all forms, the loss, and a training that learns to prefer."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepytorch.recipes import dpo
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import runs
from deepytorch.recipes.data.pairs import read_pairs, refuse_wrong_pairs
from deepytorch.recipes.data.text import IGNORED_LABEL, Example

USER, GOOD, BAD = (
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "assistant", "content": "No."},
)
TINY = [
    *("device=cpu", "hidden_size=32", "num_layers=1", "num_heads=2", "lora_r=4", "lora_alpha=8"),
    *("max_length=128", "sample_tokens=2", "batch_size=2", "merge_adapter=true"),
]


def written(tmp_path, *records):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "Is it?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"instruction": "Is it?", "chosen": "Yes.", "rejected": "No."},
        {
            "conversations": [{"from": "human", "value": "Is it?"}],
            "chosen": {"from": "gpt", "value": "Yes."},
            "rejected": {"from": "gpt", "value": "No."},
        },
    ],
    ids=["messages", "whole", "ultrafeedback", "alpaca", "sharegpt"],
)
def test_pairs_in_all_forms_are_the_same(tmp_path, record):
    (pair,), unknown = read_pairs(written(tmp_path, {**record, "score": 3}))
    for conversation, answer in ((pair.chosen, "Yes."), (pair.rejected, "No.")):
        said = [(message.role, message.content) for message in conversation.messages]
        assert said == [("user", "Is it?"), ("assistant", answer)]
        assert conversation.answers == [1]
    assert unknown == ["score"]


def test_texts_without_a_template_are_pairs_too(tmp_path):
    record = {"prompt": "Is it?", "chosen": " Yes.", "rejected": " No."}
    (pair,), _ = read_pairs(written(tmp_path, record))
    assert pair.chosen.is_text
    assert pair.rejected.messages[1].content == " No."


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, 'field "rejected" is missing'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same: leave the record out"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "a list and"),
        ({"chosen": "b", "rejected": "c"}, "no question. A pair needs"),
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, "begin otherwise"),
        ({"instruction": "a", "output": "b"}, 'field "chosen" is missing'),
    ],
)
def test_wrong_pairs_are_named(tmp_path, record, message):
    data = written(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}, record)
    with pytest.raises(RecipeError, match=r"line 2: ") as failure:
        refuse_wrong_pairs(data)
    assert message in str(failure.value)


def test_the_loss_is_dpos():
    torch.manual_seed(0)
    model = dpo.build_model(dpo.Config(hidden_size=32, num_layers=1, num_heads=2), tokenizer())
    examples = [Example([5, 6, 7, 8], [IGNORED_LABEL, IGNORED_LABEL, 7, 8])]
    examples += [Example([5, 6, 9], [IGNORED_LABEL, IGNORED_LABEL, 9])]
    pair = dpo.EncodedPair(*examples, row=0)
    reference = torch.tensor([[-9.0, -5.0]])
    batch = dpo.PreferenceData([], [pair], reference, 0, dpo.Conversation()).batch([pair])
    with torch.no_grad():
        loss = dpo.preference_loss(model, 0.5)(batch, torch.tensor(2.0)).item()
        scores = []
        for example in examples:
            likelihoods = (
                model(input_ids=torch.tensor([example.input_ids])).logits[0].log_softmax(-1)
            )
            scores.append(
                sum(
                    likelihoods[at - 1, example.input_ids[at]]
                    for at in range(2, len(example.input_ids))
                )
            )
    margin = (scores[0] + 9.0) - (scores[1] + 5.0)
    assert loss == pytest.approx(math.log1p(math.exp(-0.5 * margin)) / 2, rel=1e-4)


def tokenizer():
    return dpo.chat_tokenizer()


def test_it_learns_to_prefer_and_saves_a_model(tmp_path):
    records = [
        {"prompt": [{**USER, "content": f"Is {number} odd?"}], "chosen": [GOOD], "rejected": [BAD]}
        for number in range(40)
    ]
    words = [f"data={written(tmp_path, *records)}", f"output_dir={tmp_path / 'runs'}", "epochs=2"]
    assert dpo.main([*TINY, *words, "learning_rate=1e-2"]) == 0
    (run_dir,) = runs(str(tmp_path / "runs"), "dpo")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # nothing is preferred yet
    assert len(losses) == 36  # two epochs of 36 pairs; a tenth is held out
    assert lines[-1]["held_out_loss"] < 0.6
    model = AutoModelForCausalLM.from_pretrained(run_dir / "merged")
    own = AutoTokenizer.from_pretrained(run_dir / "merged")
    asked = own.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)

    def margin(model):
        found = []
        for answer in ("Yes.", "No."):
            ids = own(asked + answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                found.append(-model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1))
        return found[0] - found[1]

    torch.manual_seed(42)
    before = dpo.build_model(dpo.Config(hidden_size=32, num_layers=1, num_heads=2), own)
    assert margin(model) > margin(before) + 1
