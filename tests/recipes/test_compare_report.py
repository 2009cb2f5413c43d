# SPDX-License-Identifier: Apache-2.0
"""Tests what --compare makes of its samples, without training anything."""

import json
import math

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from deepytorch.recipes import bert_mlm
from deepytorch.recipes.runner import compare
from deepytorch.recipes.runner.compare import Comparison, Spread, order_of, plot, print_table
from deepytorch.recipes.runner.rounding import drops_out, nudged

SIZE = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
SIZE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


def comparison(stock_losses, our_losses, again_losses=None, *, stock_s=2.0, our_s=1.0):
    backends = {"stock": "gloo", "ours": "deepytorch"}
    if again_losses is not None:
        backends["again"] = "gloo"
    result = Comparison(backends=backends)
    for again in again_losses or []:
        result.add("again", again, stock_s, 100)
    for stock, ours in zip(stock_losses, our_losses, strict=True):
        result.add("stock", stock, stock_s, 100)
        result.add("ours", ours, our_s, 100)
    return result


def test_arms_alternate_in_mirrored_pairs():
    turns = [arm for step in (1, 2, 3, 4) for arm in order_of(step)]
    assert turns == ["stock", "ours", "ours", "stock", "stock", "ours", "ours", "stock"]


def test_ratio_is_above_one_when_ours_is_faster():
    result = comparison([3.0] * 6, [3.0] * 6)
    assert result.ratios == [2.0]
    assert result.units_per_s("ours") == 2 * result.units_per_s("stock") == 100


def test_warm_up_steps_keep_their_losses_but_not_their_times():
    result = comparison([3.0], [3.0], stock_s=50.0)
    for _ in range(3):
        result.add("stock", 3.0, 50.0, 100)
        result.add("ours", 3.0, 1.0, 100)
    for _ in range(4):
        result.add("stock", 3.0, 1.0, 100)
        result.add("ours", 3.0, 1.0, 100)
    assert result.ratios == [1.0, 1.0]
    assert len(result.to_dict()["arms"]["stock"]["losses"]) == 8


def test_a_single_step_still_has_a_ratio():
    assert comparison([3.0], [3.0]).ratios == [2.0]


def test_what_favours_the_first_arm_of_a_step_cancels():
    result = Comparison(backends={"stock": "gloo", "ours": "deepytorch"})
    for step in range(1, 10):
        for arm, seconds in zip(order_of(step), (3.0, 1.0), strict=True):
            result.add(arm, 3.0, seconds, 100)
    assert result.ratios == [1.0, 1.0]


def test_spread_is_median_and_quartiles():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_losses_beyond_the_tolerance_are_told():
    assert comparison([3.0, 2.0], [3.0, 2.00005]).verdict(1e-4) is None
    verdict = comparison([3.0, 2.0, 1.0], [3.0, 2.5, 1.0]).verdict(1e-4)
    assert "differ by 0.5, more than loss_tolerance=0.0001" in verdict


@pytest.mark.parametrize("losses", [[math.nan, 3.0], [3.0, math.nan]])
def test_a_nan_never_passes(losses):
    assert comparison([3.0, 3.0], losses).verdict(1e-4) is not None
    assert comparison(losses, losses).verdict(1e-4) is not None


NOISE = [0.01, -0.02, 0.015, -0.005] * 10


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ([-each for each in NOISE], None),
        ([1.8 * each for each in NOISE], None),
        ([3 * each for each in NOISE], "lie 0.0375 apart in the second half"),
        ([abs(each) * 1.5 for each in NOISE], "mean difference +0.0187"),
        ([math.nan] * 40, "not equivalent"),
        ([*NOISE[:-1], math.nan], "not equivalent"),
    ],
)
def test_long_curves_may_lie_apart_as_far_as_rounding_drives_them(ours, says):
    stock = [3.0 - 0.01 * step for step in range(40)]

    def near(noise):
        return [loss + each for loss, each in zip(stock, noise, strict=True)]

    verdict = comparison(stock, near(ours), near(NOISE)).verdict(1e-4)
    assert (verdict is None) == (says is None)
    assert says is None or says in verdict


def test_equal_curves_need_no_noise_to_hide_in():
    assert comparison([3.0, 2.0], [3.0, 2.0], [3.0, 2.0]).verdict(1e-4) is None
    assert comparison([3.0, 2.0], [3.0, 2.1], [3.0, 2.0]).verdict(1e-4) is not None


def test_a_nudge_is_the_same_each_time_and_as_small_as_rounding():
    def make():
        torch.manual_seed(3)
        return torch.nn.Linear(64, 64)

    stock, again, once_more = make(), nudged(make, 1)(), nudged(make, 1)()
    assert torch.equal(again.weight, once_more.weight)
    changed = (again.weight != stock.weight).float().mean()
    assert changed > 0.3
    torch.testing.assert_close(again.weight, stock.weight, rtol=2.5e-7, atol=0)


@pytest.mark.parametrize(
    ("model", "drops"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (Qwen3ForCausalLM(Qwen3Config(**SIZE)), False),
        (Qwen3ForCausalLM(Qwen3Config(**SIZE, attention_dropout=0.1)), True),
    ],
)
def test_dropout_is_seen_in_layers_and_in_attention(model, drops):
    assert drops_out(model) == drops


# The texts are this file's lines: to encode the usual ones takes longer than all else in a run.
TINY = [
    *("--compare", f"data={__file__}", "device=cpu", "hidden_size=16", "num_layers=1"),
    *("num_heads=2", "max_length=32"),
    *("batch_size=2", "steps=2", "held_out=2", "dropout=0.1"),
]


@pytest.mark.parametrize("judged", [False, True])
def test_dropout_is_compared_where_chance_can_be_told(tmp_path, monkeypatch, capsys, judged):
    monkeypatch.setattr(compare, "plot", lambda comparison, path, verdict: None)
    words = [f"output_dir={tmp_path}", f"rounding_arm={judged}"]
    assert bert_mlm.main([*TINY, *words]) == (0 if judged else 2)
    if judged:
        (path,) = tmp_path.glob("*/compare.json")
        found = json.loads(path.read_text())
        assert found["drift"]["again"]["size"] > 1e-4  # the third arm has dropout of its own
        assert (found["draws_others"], found["not_equivalent"]) == (True, None)
        assert "lie apart, both with dropout of their own" in "".join(
            capsys.readouterr().out.split("\n")
        ).replace(f"{found['drift']['again']['size']:.3g} ", "")
        return
    torch.distributed.destroy_process_group()  # an error leaves that to the process's end
    said = "dropout draws other numbers for rows without padding"
    assert said in capsys.readouterr().err


def test_table_names_what_every_recipe_writes(tmp_path, capsys):
    print_table(comparison([3.0], [3.0]), tmp_path, 1e-4)
    lines = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path) in line]
    assert [line.split()[0] for line in lines] == ["plot", "samples", "scalars"]


@pytest.mark.parametrize("ours", [[3.0, 2.5], [math.nan, 2.0], [3.0, math.inf]])
def test_no_ratio_is_claimed_of_other_losses(ours, tmp_path, capsys):
    for losses, is_claimed in (([3.0, 2.0], True), (ours, False)):
        result = comparison([3.0, 2.0], losses)
        print_table(result, tmp_path, 1e-4)
        said = capsys.readouterr().out
        assert ("above 1 deepytorch is faster" in said) == is_claimed
        assert ("not claimed: the two runs are not equivalent" in said) != is_claimed


@pytest.mark.parametrize("again", [None, [3.0, 2.0]])
@pytest.mark.parametrize("verdict", [None, "they differ"])
def test_plot_is_written(tmp_path, again, verdict):
    plot(comparison([3.0, 2.0], [3.0, 2.0], again), tmp_path / "compare.png", verdict)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
