# SPDX-License-Identifier: Apache-2.0
"""A recipe's options: the packaged YAML, overrides, and what wrong ones answer."""

import dataclasses
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
import yaml

import deepytorch.recipes
from deepytorch.recipes import DESCRIPTIONS, RECIPES
from deepytorch.recipes.base.config import RecipeError, load_config, parse_arguments
from deepytorch.recipes.base.rank_consistency import draw_apart
from deepytorch.recipes.base.run import Process, console
from deepytorch.recipes.llama_sft import DEFAULT_CONFIG, Config, main


@pytest.mark.parametrize("recipe", RECIPES)
def test_packaged_yaml_holds_every_option_with_its_default(recipe):
    config_class = importlib.import_module(RECIPES[recipe]).Config
    path = DEFAULT_CONFIG.with_name(f"{recipe}.yaml")
    names = {field.name for field in dataclasses.fields(config_class)}
    assert yaml.safe_load(path.read_text()).keys() == names
    assert load_config(config_class, path) == config_class()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short_enough_to_copy(recipe):
    (path,) = Path(deepytorch.recipes.__path__[0]).glob(f"{recipe}.py")
    assert len(path.read_text().splitlines()) <= 300


def test_every_recipe_is_registered_and_described():
    found = pkgutil.iter_modules(deepytorch.recipes.__path__)
    modules = {module.name for module in found if not module.ispkg}
    assert {name for name in modules if not name.startswith("_")} == RECIPES.keys()
    assert RECIPES.keys() == DESCRIPTIONS.keys()


def test_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 7\nseed: 3\nlearning_rate: 3e-4\n")
    config = load_config(Config, path, ["steps=9", "model=some/where", "learning_rate=2e-5"])
    assert (config.steps, config.seed, config.model) == (9, 3, "some/where")
    assert config.learning_rate == 2e-5
    assert load_config(Config, path, ["learning_rate=null"]).learning_rate is None
    assert load_config(Config, path, ["name=42"]).name == "42"


@pytest.mark.parametrize(
    "text",
    [
        "1.10",
        "010",
        "1:30",
        "2024-01-01",
        "on",
        "[red]exp",
        "a photo: of sks",
        "'",
        "'a' b",
        "'a' b 'c'",
    ],
)
def test_a_text_stays_as_it_is_written(text):
    assert load_config(Config, DEFAULT_CONFIG, [f"name={text}"]).name == text
    assert load_config(Config, DEFAULT_CONFIG, [f'name="{text}"']).name == text
    assert load_config(Config, DEFAULT_CONFIG, [f"data={text}"]).data == text


@pytest.mark.parametrize("text", ["", "null", "NULL", "~"])
def test_no_text_is_none(text):
    assert load_config(Config, DEFAULT_CONFIG, [f"data={text}"]).data is None
    assert load_config(Config, DEFAULT_CONFIG, ["data='null'"]).data == "null"


@pytest.mark.parametrize("text", ["runs #2", "#2", "42 # 3", "a#b", "'runs #2'"])
def test_a_word_has_no_comments(text):
    config = load_config(Config, DEFAULT_CONFIG, [f"output_dir={text}"])
    assert config.output_dir == text.strip("'")


def test_paths_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text("output_dir: ~/x\n")
    config = load_config(Config, path, ["data=~/y.json"])
    assert (config.output_dir, config.data) == (f"{tmp_path}/x", f"{tmp_path}/y.json")


def test_words_and_flags_mix():
    found = parse_arguments(
        ["steps=1", "--compare", "seed=2"], recipe="llama_sft", default=DEFAULT_CONFIG
    )
    assert found.compare
    assert found.overrides == ["steps=1", "seed=2"]
    assert found.config == DEFAULT_CONFIG


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "step=4",
            "unknown key 'step' in the command line. Did you mean steps?",
        ),
        ("lr=1", "unknown key 'lr' in the command line. Did you mean learning_rate?"),
        ("max_seq_length=1", "Did you mean max_length?"),
        ("bf16=true", "Did you mean precision=bf16?"),
        ("zzz=1", "unknown key 'zzz' in the command line. Valid keys: name, output_dir"),
        (["steps=3", "epochs=1"], "steps and epochs at once: leave one out"),
        ("epochs=0", "epochs must be greater than 0, not 0.0"),
        ("trackers=wnb", "trackers=wnb: no tracker of that name; known: tensorboard, wandb"),
        (["optimizer=muon", "engine=fsdp2"], "which optimizer=muon can't train"),
        ("engine=deepsped", "not 'deepsped'. Did you mean deepspeed?"),
        ("steps", "'steps' is not an option: write key=value"),
        ("steps=many", "steps must be a whole number, not 'many'"),
        ("steps=1.5", "steps must be a whole number, not 1.5"),
        ("steps=true", "steps must be a whole number, not True"),
        ("steps=0", "steps must be greater than 0"),
        ("learning_rate=0", "learning_rate must be greater than 0, not 0.0"),
        ("learning_rate=-1", "learning_rate must be greater than 0, not -1.0"),
        ("learning_rate=.nan", "learning_rate must be greater than 0, not nan"),
        ("learning_rate=.inf", "learning_rate must be finite, not inf"),
        ("weight_decay=-1", "weight_decay must be 0 or more and finite, not -1.0"),
        ("weight_decay=.inf", "weight_decay must be 0 or more and finite, not inf"),
        ("weight_decay=.nan", "weight_decay must be 0 or more and finite, not nan"),
        ("learning_rate=fast", "learning_rate must be a number, not 'fast'"),
        ("precision=fp4", "precision must be one of auto, fp32, bf16, fp16, fp8, not 'fp4'"),
        ("offload=optimizer", "offload=optimizer needs engine=deepspeed or engine=fsdp2"),
        ("num_heads=3", "hidden_size=256 must be a multiple of 2 * num_heads (6)"),
        ("steps=[1", "steps=[1 is not a valid value"),
        ("steps=4 # or 5", "steps must be a whole number, not '4 # or 5'"),
        ("warmup_steps=-1", "warmup_steps must be 0 or more, not -1"),
        ("evaluate_every=-2", "evaluate_every must be 0 or more, not -2"),
        ("save_every=-3", "save_every must be 0 or more, not -3"),
        ("seed=-1", "seed must be 0 or more and below 2**63, not -1"),
        ("seed=9223372036854775808", "seed must be 0 or more and below 2**63, not 92"),
    ],
)
def test_wrong_words_say_what_to_write(word, message):
    with pytest.raises(RecipeError) as failure:
        load_config(Config, DEFAULT_CONFIG, [word] if isinstance(word, str) else word)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("recipe", "word", "message"),
    [
        ("qwen_lora", "lora_dropout=1", "lora_dropout must be 0 or more and below 1, not 1.0"),
        ("qwen_lora", "lora_dropout=-0.1", "lora_dropout must be 0 or more and below 1, not -0.1"),
        ("bert_mlm", "dropout=.nan", "dropout must be 0 or more and below 1, not nan"),
        ("resnet50_ddp", "num_workers=-1", "num_workers must be 0 or more, not -1"),
        ("stable_diffusion_dreambooth", "prior_weight=.nan", "needs a finite prior_weight >= 0"),
        ("stable_diffusion_dreambooth", "prior_weight=.inf", "needs a finite prior_weight >= 0"),
    ],
)
def test_what_a_recipe_adds_has_its_range(recipe, word, message):
    config_class = importlib.import_module(RECIPES[recipe]).Config
    with pytest.raises(RecipeError) as failure:
        load_config(config_class, DEFAULT_CONFIG.with_name(f"{recipe}.yaml"), [word])
    assert message in str(failure.value)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_half_precision_asks_for_the_gpu_that_is_there(device, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["precision=fp16", f"device={device}"]) == 2
    assert "precision=fp16 needs a GPU" in capsys.readouterr().err


def test_a_comparison_resumes_nothing(capsys):
    assert main(["--compare", "resume=auto", "device=cpu"]) == 2
    assert "from the start, which resume=auto does not: leave" in capsys.readouterr().err


def test_brackets_and_colons_are_printed_as_they_are(capsys):
    text = "checkpoint  runs/[red]x[/b]:bug:/checkpoint"
    console.print(text)
    assert capsys.readouterr().out.strip() == text


@pytest.mark.parametrize("world_size", [1, 8])
def test_ranks_draw_apart_from_the_largest_seed(world_size):
    process = Process(world_size - 1, world_size, torch.device("cpu"))
    draw_apart(2**63 - 1, process)
    largest = torch.rand(3)
    draw_apart(42, process)
    assert not torch.equal(torch.rand(3), largest)


def test_what_megatron_cannot_do_is_named():
    for word, message in (("device=cpu", "needs a GPU"), ("precision=fp16", "no precision=fp16")):
        with pytest.raises(RecipeError, match=f"engine=megatron .*{message}"):
            load_config(Config, DEFAULT_CONFIG, ["engine=megatron", word])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 4\n", "unknown key 'stepz' in"),
        ("- a\n- b\n", "not a list"),
        ("steps: [\n", "is not valid YAML"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as failure:
        load_config(Config, path)
    assert message in str(failure.value)
    assert str(path) in str(failure.value)


def test_main_prints_the_error_and_returns_two(capsys, tmp_path):
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "llama_sft: cannot read the configuration" in capsys.readouterr().err
