# SPDX-License-Identifier: Apache-2.0
"""Every recipe, tiny, in this process: the loss falls, and others can load what it saves."""

import json
import math

import pytest
import torch
from diffusers import PNDMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from peft import PeftModel
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertTokenizerFast,
)

from deepytorch.recipes import (
    bert_mlm,
    llama_sft,
    qwen_lora,
    resnet50_ddp,
    stable_diffusion_dreambooth,
)
from deepytorch.recipes.base.config import RecipeError, load_config
from deepytorch.recipes.data import images as _images
from deepytorch.recipes.models import diffusion

CPU = ["device=cpu", "warmup_steps=1"]
QWEN = ["hidden_size=32", "num_layers=1", "num_heads=2", "max_length=64", "sample_tokens=3"]
DIFFUSION = ["num_class_images=2", "batch_size=2", "sample_steps=2", "image_size=32"]
CHATS = [
    {
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": f"What is {number} + 1?"},
            {"from": "gpt", "value": str(number + 1)},
            {"from": "human", "value": "And one more?"},
            {"from": "gpt", "value": str(number + 2)},
        ]
    }
    for number in range(12)
]


def run(recipe, output_dir, *words):
    """The folder of a finished run."""
    assert recipe.main([*CPU, f"output_dir={output_dir}", *words]) == 0
    (run_dir,) = (path for path in output_dir.iterdir() if (path / "tensorboard").exists())
    return run_dir


def losses(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [event.value for event in events.Scalars("train/loss")]


def test_resnet_learns_and_shows_what_it_takes_images_for(tmp_path):
    words = ["width=4", "image_size=24", "steps=40", "batch_size=16", "held_out=8"]
    run_dir = run(resnet50_ddp, tmp_path, *words)
    found = losses(run_dir)
    assert found[0] == pytest.approx(math.log(9), abs=0.5)
    assert sum(found[-4:]) / 4 < found[0] - 0.6
    config = load_config(resnet50_ddp.Config, resnet_yaml(), words)
    model = resnet50_ddp.build_model(config, 9)
    model.load_state_dict(torch.load(run_dir / "model.pt", weights_only=True))
    assert len(json.loads((run_dir / "classes.json").read_text())) == 9
    with Image.open(run_dir / "sample.png") as image:
        assert image.size == (4 * 24, 2 * 24)


def resnet_yaml():
    return llama_sft.DEFAULT_CONFIG.with_name("resnet50_ddp.yaml")


def test_folders_of_images_are_classes(tmp_path):
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("RGB", (40, 30), colour).save(tmp_path / name / f"{number}.png")
    trained, kept = _images.folder_images(tmp_path, 16, seed=0, held_out=2)
    assert (trained.size, kept.size, trained.classes) == (4, 2, ["blue", "red"])
    pixels, label = trained.draw(0, 0)
    assert label == 0
    assert pixels.shape == (3, 16, 16)
    assert pixels[:, 5, 5].tolist() == [-1.0, -1.0, 1.0]
    assert torch.equal(pixels, trained.draw(0, 0)[0])
    (tmp_path / "blue" / "1.png").write_text("no image")
    with pytest.raises(RecipeError, match=r"blue/1\.png cannot be read as an image"):
        trained.draw(0, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="empty has no images"):
        _images.folder_images(tmp_path, 16, seed=0, held_out=2)


def test_bert_learns_and_loads_in_plain_transformers(tmp_path):
    words = ["hidden_size=32", "num_layers=1", "num_heads=2", "max_length=48", f"data={__file__}"]
    run_dir = run(bert_mlm, tmp_path, *words, "steps=20", "held_out=4", "learning_rate=1e-2")
    found = losses(run_dir)
    assert found[-1] < found[0] - 1
    model = AutoModelForMaskedLM.from_pretrained(run_dir / "checkpoint")
    assert type(model).__name__ == "BertForMaskedLM"
    assert "hidden tokens are right" in (run_dir / "sample.txt").read_text()


def test_a_bert_without_an_end_token_trains_from_its_folder(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nof\na\n")
    tokenizer = BertTokenizerFast(str(source / "vocab.txt"))
    tokenizer.save_pretrained(source)
    config = bert_mlm.Config(hidden_size=32, num_layers=1, num_heads=2)
    bert_mlm.build_model(config, tokenizer).save_pretrained(source)
    texts = [f"data={__file__}", "max_length=32"]
    run_dir = run(bert_mlm, tmp_path / "runs", f"model={source}", *texts, "steps=1")
    assert AutoTokenizer.from_pretrained(run_dir / "checkpoint").eos_token is None


def test_adapter_and_merged_model_answer_alike(tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps(chat) for chat in CHATS))
    words = [*QWEN, f"data={data}", "max_length=256", "steps=8", "batch_size=2"]
    run_dir = run(qwen_lora, tmp_path / "runs", *words, "merge_adapter=true")
    found = losses(run_dir)
    assert found[-1] < found[0] - 0.1
    saved = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
    assert (saved["peft_type"], saved["r"], saved["lora_alpha"]) == ("LORA", 16, 32)
    assert "lm_head" not in saved["target_modules"]

    tokenizer = AutoTokenizer.from_pretrained(run_dir / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "merged")
    config = load_config(qwen_lora.Config, qwen_yaml(), words)
    torch.manual_seed(config.seed)
    base = qwen_lora.build_model(config, qwen_lora.chat_tokenizer())
    adapted = PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    ids = tokenizer("What is 5 + 1?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)


def qwen_yaml():
    return llama_sft.DEFAULT_CONFIG.with_name("qwen_lora.yaml")


def test_a_sharded_checkpoint_trains_from_its_folder_and_loads_back(tmp_path):
    tokenizer = qwen_lora.chat_tokenizer()
    torch.manual_seed(0)
    config = qwen_lora.Config(hidden_size=32, num_layers=2, num_heads=2)
    source, data = tmp_path / "source", tmp_path / "chats.json"
    qwen_lora.build_model(config, tokenizer).save_pretrained(source, max_shard_size="20KB")
    tokenizer.save_pretrained(source)
    assert len(list(source.glob("model-*.safetensors"))) > 1
    data.write_text(json.dumps(CHATS))
    words = [f"model={source}", f"data={data}", "max_length=256", "batch_size=2", "steps=2"]
    run_dir = run(llama_sft, tmp_path / "runs", *words, "sample_tokens=2", "learning_rate=1e-3")
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint")
    assert type(trained).__name__ == "Qwen3ForCausalLM"
    before = AutoModelForCausalLM.from_pretrained(source)
    moved = (trained.lm_head.weight - before.lm_head.weight).abs().max().item()
    assert 0 < moved < 1e-2
    again = AutoTokenizer.from_pretrained(run_dir / "checkpoint")
    assert again.chat_template == tokenizer.chat_template


def test_qlora_is_refused_with_what_to_use_instead():
    with pytest.raises(RecipeError, match="qlora is not supported: .* method=lora precision=bf16"):
        qwen_lora.Config(method="qlora")


def test_whole_unet_is_saved_as_a_pipeline(tmp_path):
    run_dir = run(stable_diffusion_dreambooth, tmp_path, *DIFFUSION, "steps=16", "kernels=off")
    found = losses(run_dir)
    assert sum(found[-4:]) < sum(found[:4]) - 0.8
    pipeline = StableDiffusionPipeline.from_pretrained(run_dir / "pipeline")
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    with Image.open(run_dir / "sample.png") as image:
        assert image.size == (4 * 32, 32)
    (made,) = tmp_path.glob("stable_diffusion_dreambooth-class-32px-*")
    assert len(list(made.glob("*.png"))) == 2
    # The same recipe can start from the saved model.
    words = [f"model={run_dir / 'pipeline'}", "steps=1", f"class_data={made}", *DIFFUSION]
    run(stable_diffusion_dreambooth, tmp_path / "again", *words, "kernels=off")


@pytest.mark.parametrize("architecture", ["sd15", "sdxl"])
def test_lora_loads_into_a_pipeline(tmp_path, architecture, monkeypatch):
    monkeypatch.setattr(diffusion, "fit_vae", lambda vae, images: None)
    with_text = architecture == "sd15"
    words = [f"architecture={architecture}", f"train_text_encoder={str(with_text).lower()}"]
    run_dir = run(
        stable_diffusion_dreambooth, tmp_path, *DIFFUSION, *words, "method=lora", "steps=2"
    )
    config = stable_diffusion_dreambooth.Config(architecture=architecture, image_size=32)
    parts = stable_diffusion_dreambooth.make_parts(config)
    pipeline = parts.pipeline()
    cls = StableDiffusionPipeline if with_text else StableDiffusionXLPipeline
    assert isinstance(pipeline, cls)
    pipeline.load_lora_weights(run_dir / "lora")
    adapted = [name for name, _ in parts.unet.named_parameters() if "lora_B" in name]
    assert adapted
    assert any(
        parameter.abs().max() > 0 for n, parameter in parts.unet.named_parameters() if "lora_B" in n
    )
    assert with_text == any("lora" in name for name, _ in parts.text_encoders[0].named_parameters())


def test_a_pipeline_keeps_its_own_scheduler(tmp_path):
    parts = diffusion.small_parts("sd15", 32)
    parts.sampler = PNDMScheduler.from_config(parts.scheduler.config)
    parts.pipeline().save_pretrained(tmp_path)
    loaded = diffusion.load_parts(str(tmp_path))
    assert type(loaded.scheduler).__name__ == "DDPMScheduler"
    assert type(loaded.pipeline().scheduler).__name__ == "PNDMScheduler"


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample", "flow"])
def test_target_follows_the_scheduler(kind):
    parts = diffusion.small_parts("sd15", 32)
    parts.scheduler.register_to_config(prediction_type=kind)
    latents, noise = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    steps = torch.tensor([10, 700])
    if kind == "flow":
        with pytest.raises(RecipeError, match="prediction_type is 'flow'"):
            diffusion.target_of(parts.scheduler, latents, noise, steps)
        return
    target = diffusion.target_of(parts.scheduler, latents, noise, steps)
    alpha = parts.scheduler.alphas_cumprod[steps].double()[:, None, None, None]
    expected = {
        "epsilon": noise.double(),
        "sample": latents.double(),
        "v_prediction": alpha.sqrt() * noise - (1 - alpha).sqrt() * latents,
    }[kind]
    torch.testing.assert_close(target.double(), expected, atol=1e-5, rtol=1e-5)


def test_dry_run_counts_parameters_exactly(tmp_path, capsys):
    words = ["hidden_size=64", "num_heads=2", "batch_size=2", f"output_dir={tmp_path}"]
    assert llama_sft.main(["--dry-run", *CPU, *words]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "optimizer (adamw)" in capsys.readouterr().out


def test_estimates_follow_the_engine():
    from deepytorch.recipes.runner.memory import state_bytes

    model = torch.nn.Linear(100, 10)
    size = 4 * 1010

    def of(**words):
        found = state_bytes(model, llama_sft.Config(precision="fp32", **words), 4)
        return found.parameters, found.gradients, found.optimizer

    assert of() == (size, size, 2 * size)
    assert of(engine="deepspeed", zero_stage=2) == (size, size // 4, 2 * size // 4)
    assert of(engine="megatron") == (size, size, 2 * size // 4)
    assert of(engine="fsdp2") == (size // 4, size // 4, 2 * size // 4)
    assert of(engine="deepspeed", zero_stage=3, offload="optimizer")[2] == 0
    model.weight.requires_grad_(False)
    assert of() == (size, 40, 80)
