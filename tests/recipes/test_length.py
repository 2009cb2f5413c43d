# SPDX-License-Identifier: Apache-2.0
"""Steps and epochs, schedules and optimizers by name, and what a run's folder has."""

import copy
import json

import pytest
import torch
import yaml
from transformers import get_scheduler

from deepytorch.recipes import llama_sft
from deepytorch.recipes.base.config import load_config
from deepytorch.recipes.base.run import Process, runs
from deepytorch.recipes.bert_mlm import Config as BertConfig
from deepytorch.recipes.data.batches import EndlessBatches
from deepytorch.recipes.llama_sft import Config
from deepytorch.recipes.runner.length import settle_device, settle_length
from deepytorch.recipes.runner.log import RunLog
from deepytorch.recipes.runner.optimizers import make_optimizer, make_schedule
from deepytorch.recipes.stable_diffusion_dreambooth import Config as DreamboothConfig

CPU = torch.device("cpu")


def batches_of(num_examples, config, world_size=2):
    return EndlessBatches(
        num_examples,
        lambda index, epoch: index,
        lambda drawn: drawn,
        batch_size=config.batch_size,
        rank=0,
        world_size=world_size,
        seed=1,
    )


@pytest.mark.parametrize(
    ("options", "steps", "said"),
    [
        ({}, 50, "50 steps of 8 examples = 0.4 epochs of the embedded data"),
        ({"data": "x.json"}, 375, "375 steps of 8 examples = 3 epochs of your data"),
        ({"data": "x.json", "epochs": 0.5}, 63, "= 50 % of your data, which has 1,000"),
        ({"data": "x.json", "steps": 1}, 1, "1 steps of 8 examples = 0.8 % of your data"),
        ({"data": "x.json", "accumulation": 2}, 188, "steps of 16 examples = 3.01 epochs"),
    ],
)
def test_epochs_become_steps(options, steps, said, capsys):
    config = Config(**options)
    settled = settle_length(config, batches_of(1000, config), Process(0, 2, CPU))
    assert settled.total_steps == steps
    said = said.replace("0.4 epochs", "40 %")
    assert said in capsys.readouterr().out.replace("\n", " ")


def test_a_few_images_are_seen_often():
    assert DreamboothConfig(data="dog").usual_steps == 400
    assert (BertConfig().usual_steps, BertConfig(data="x").usual_epochs) == (150, 3)


def test_the_cpu_trains_in_fp32_and_halves_are_allowed_their_rounding():
    assert settle_device(Config(data="x"), CPU).precision == "fp32"
    assert settle_device(Config(), CPU).total_tolerance == 1e-4
    assert settle_device(Config(precision="bf16"), CPU).total_tolerance == 1e-2
    assert settle_device(Config(precision="bf16", loss_tolerance=0.5), CPU).total_tolerance == 0.5


@pytest.mark.parametrize(
    "name",
    [
        *("cosine", "linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"),
        *("cosine_with_min_lr", "warmup_stable_decay"),
    ],
)
def test_no_step_of_a_schedule_has_a_rate_of_zero(name):
    config = Config(schedule=name, steps=40, warmup_steps=4)
    optimizer = torch.optim.SGD([torch.zeros(())], lr=2.0)
    schedule, rates = make_schedule(optimizer, config), []
    for _ in range(40):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert min(rates) > 0
    assert max(rates) == pytest.approx(2.0)
    if name != "constant":
        assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    # Gone on with in the middle, as a resumed run does.
    (group,) = optimizer.param_groups
    group.update(initial_lr=2.0)
    assert make_schedule(optimizer, config, after=20).get_last_lr()[0] == pytest.approx(rates[20])


def test_a_schedule_is_transformers_one_step_later():
    config = Config(schedule="linear", steps=10, warmup_steps=2)
    (ours,) = make_schedule(torch.optim.SGD([torch.zeros(())], lr=1.0), config).lr_lambdas
    theirs = get_scheduler("linear", torch.optim.SGD([torch.zeros(())], lr=1.0), 2, 11)
    (factor,) = theirs.lr_lambdas
    assert [ours(step) for step in range(10)] == [factor(step + 1) for step in range(10)]


def tiny_model():
    torch.manual_seed(0)
    config = Config(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2)
    return llama_sft.build_model(config, llama_sft.byte_tokenizer())


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd", "adafactor"])
def test_optimizers_learn_and_go_on_from_their_state(name):
    ids = torch.arange(64).reshape(2, 32)

    def trained(model, optimizer, steps):
        for _ in range(steps):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def fresh(model):
        rate = 0.5 if name == "sgd" else 1e-2
        return make_optimizer(model, model.parameters(), Config(optimizer=name), rate)

    model = tiny_model()
    optimizer = fresh(model)
    first = trained(model, optimizer, 1)
    trained(model, optimizer, 5)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = tiny_model()
    other.load_state_dict(weights)
    resumed = fresh(other)
    resumed.load_state_dict(state)
    assert trained(other, resumed, 3) == trained(model, optimizer, 3) < first - 0.3


def test_muon_takes_the_matrices_within_and_follows_the_schedule():
    model = tiny_model()
    optimizer = make_optimizer(model, model.parameters(), Config(optimizer="muon"), 0.1)
    muon, others = optimizer.param_groups
    ends = {id(model.model.embed_tokens.weight), id(model.lm_head.weight)}
    assert {id(parameter) for parameter in muon["params"]}.isdisjoint(ends)
    assert ends <= {id(parameter) for parameter in others["params"]}
    assert all(parameter.ndim == 2 for parameter in muon["params"])
    schedule = make_schedule(optimizer, Config(steps=10, warmup_steps=2))
    schedule.step()
    schedule.step()
    assert all(part.param_groups[0]["lr"] < 0.1 for part in optimizer._parts)


def test_trackers_of_accelerate_get_the_scalars(tmp_path):
    log = RunLog(tmp_path, ("tensorboard",), {"steps": 3})
    log.write(1, loss=2.0)
    log.write(2, loss=float("nan"))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_run_leaves_its_options_and_a_model_card(tmp_path):
    words = ["device=cpu", "steps=2", "hidden_size=32", "intermediate_size=64", "num_layers=1"]
    words += ["num_heads=2", "max_length=128", "sample_tokens=2", f"output_dir={tmp_path}"]
    assert llama_sft.main(words) == 0
    (run_dir,) = runs(str(tmp_path), "llama_sft")
    again = load_config(Config, run_dir / "config.yaml")
    assert (again.steps, again.hidden_size, again.precision) == (2, 32, "fp32")
    card = (run_dir / "checkpoint" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["tags"] == ["deepytorch", "llama_sft"]
    assert "loss held out" in card
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "loss" in step] == [1, 2]
    assert steps[0]["learning_rate"] > 0
