# SPDX-License-Identifier: Apache-2.0
"""token_balance= of the recipes: stock's examples in each step, in other places."""

import random

import pytest

from deepytorch.recipes.base.config import RecipeError, load_config
from deepytorch.recipes.data.balance import StepBalance
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.data.instructions import TextOptions
from deepytorch.recipes.llama_sft import DEFAULT_CONFIG, Config, main
from deepytorch.recipes.runner.trainer import Trainer
from deepytorch_core.c10d.patches import serving_name

RANKS, BATCH, ACCUMULATION = 3, 2, 4
CHANCE = random.Random(7)
LENGTHS = [min(900, int(CHANCE.paretovariate(1.1) * 20)) for _ in range(67)]


def ranks_of(balanced, start=0):
    """Every rank's batches of (index, epoch)."""
    found = []
    for rank in range(RANKS):
        balance = StepBalance(LENGTHS, world_size=RANKS, accumulation=ACCUMULATION)
        batches = EndlessBatches(
            len(LENGTHS),
            lambda index, epoch: (index, epoch),
            list,
            batch_size=BATCH,
            rank=rank,
            world_size=RANKS,
            seed=11,
            balance=balance if balanced else None,
        )
        batches.position = start
        found.append(batches)
    return found


def steps_of(ranks, count):
    """[step][rank][micro-batch]."""
    return [
        [[next(batches) for _ in range(ACCUMULATION)] for batches in ranks] for _ in range(count)
    ]


def tokens(micro_batches):
    return sum(LENGTHS[index] for batch in micro_batches for index, _ in batch)


def flat(step):
    return sorted(key for rank in step for batch in rank for key in batch)


def test_balanced_steps_have_stocks_examples_and_lighter_heaviest_ranks():
    stock, ours = (steps_of(ranks_of(balanced), 20) for balanced in (False, True))
    assert [flat(step) for step in ours] == [flat(step) for step in stock]
    # An epoch is 11 batches of each rank, so some steps lie in two.
    assert any(len({epoch for _, epoch in flat(step)}) == 2 for step in stock)
    heaviest = [[max(tokens(rank) for rank in step) for step in arm] for arm in (stock, ours)]
    assert all(b <= a for a, b in zip(*heaviest, strict=True))
    assert sum(heaviest[1]) < 0.9 * sum(heaviest[0])
    assert all(batch for step in ours for rank in step for batch in rank)


def test_balanced_batches_go_on_where_a_checkpoint_was_made():
    whole = steps_of(ranks_of(True), 9)
    assert steps_of(ranks_of(True, start=5 * ACCUMULATION), 4) == whole[5:]


def test_the_imbalance_is_that_of_the_steps():
    (batches, *_) = ranks_of(True)
    found = batches.imbalance()
    stock, ours = (steps_of(ranks_of(balanced), found.num_steps) for balanced in (False, True))
    mean = sum(tokens(rank) for step in stock for rank in step) / RANKS
    for arm, told in ((stock, found.before), (ours, found.after)):
        assert told == pytest.approx(sum(max(map(tokens, step)) for step in arm) / mean)
    assert ranks_of(False)[0].imbalance() is None
    batches.fit_steps(1)
    assert batches.imbalance().num_steps == 11


@pytest.mark.parametrize(
    ("words", "world_size", "why_not"),
    [
        ({}, 2, None),
        ({"accumulation": 3}, 1, None),
        ({}, 1, "nothing to balance"),
        ({"token_balance": "on"}, 1, "nothing to balance"),
        ({"token_balance": "off"}, 2, "token_balance=off"),
        ({"packing": "none"}, 2, "batches are padded"),
        ({"padding_free": "off"}, 2, "batches are padded"),
        ({"padding_free": "off", "token_balance": "on"}, 2, None),
        ({"packing": "fixed"}, 2, "rows are filled already"),
    ],
)
def test_when_examples_are_dealt_out(words, world_size, why_not):
    found = TextOptions(name="test", **words).why_no_balance(world_size)
    assert (found is None) == (why_not is None)
    assert (why_not or "") in (found or "")


def test_the_key_is_read_as_the_others_are():
    assert load_config(Config, DEFAULT_CONFIG, []).token_balance == "auto"
    assert load_config(Config, DEFAULT_CONFIG, ["token_balance=on"]).token_balance == "on"
    with pytest.raises(RecipeError, match="token_balance"):
        load_config(Config, DEFAULT_CONFIG, ["token_balanc=on"])
    with pytest.raises(RecipeError, match="auto"):
        load_config(Config, DEFAULT_CONFIG, ["token_balance=evenly"])


def test_a_comparison_leaves_stocks_batches_to_the_stock_arm(tmp_path, monkeypatch):
    taken = {}
    step = Trainer.step

    def noting(self, micro_batches):
        rows = [batch.attention_mask.sum(1).tolist() for batch in micro_batches]
        taken.setdefault(serving_name(self.group), []).append(rows)
        return step(self, micro_batches)

    monkeypatch.setattr(Trainer, "step", noting)
    words = ["device=cpu", "hidden_size=32", "intermediate_size=64", "num_layers=1", "num_heads=2"]
    words += ["max_length=512", "sample_tokens=2", "batch_size=3", "accumulation=2", "steps=2"]
    assert main(["--compare", *words, f"output_dir={tmp_path}"]) == 0
    stock, ours = taken["gloo"], taken["deepytorch"]
    assert [sorted(sum(rows, [])) for rows in ours] == [sorted(sum(rows, [])) for rows in stock]
    assert all(len(row) == 3 for rows in stock for row in rows)
    heaviest = [sum(max(map(sum, rows)) for rows in arm) for arm in (stock, ours)]
    assert heaviest[1] < heaviest[0]
