"""The models of `deepytorch bench compile`: real architectures, small on CPUs, larger on GPUs.

An entry builds a model of random weights and says how to make a batch; nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepytorch.examples import vision_models
from deepytorch_core.bench.job import BenchError

Batch = dict[str, torch.Tensor]
LossOf = Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class CompileWorkload:
    """A model, a function that makes the next batch, and one from both to the loss."""

    model: nn.Module
    batch: Callable[[torch.Generator], Batch]
    loss: LossOf
    samples: int


@dataclass(frozen=True)
class Size:
    """How large a workload is; images are squares of `image` pixels."""

    width: int
    heads: int
    layers: int
    tokens: int
    samples: int
    image: int
    vocabulary: int


ON_CPU = Size(width=96, heads=4, layers=8, tokens=48, samples=4, image=64, vocabulary=512)
ON_GPU = Size(width=1024, heads=16, layers=16, tokens=512, samples=8, image=224, vocabulary=32000)


def _text(model: nn.Module, size: Size, **more: bool) -> CompileWorkload:
    def batch(generator: torch.Generator) -> Batch:
        shape = (size.samples, size.tokens)
        ids = torch.randint(3, size.vocabulary, shape, generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return CompileWorkload(model, batch, lambda m, b: m(**b).loss, size.samples)


def _images(model: nn.Module, size: Size, classes: int = 100) -> CompileWorkload:
    def batch(generator: torch.Generator) -> Batch:
        shape = (size.samples, 3, size.image, size.image)
        return {
            "x": torch.randn(shape, generator=generator),
            "y": torch.randint(0, classes, (size.samples,), generator=generator),
        }

    def loss(m: nn.Module, b: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(m(b["x"]), b["y"])

    return CompileWorkload(model, batch, loss, size.samples)


def _decoder(family: str, **own: Any) -> Callable[[Size], CompileWorkload]:
    def build(size: Size) -> CompileWorkload:
        library = importlib.import_module("transformers")
        config = getattr(library, f"{family}Config")(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=3 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=2 * size.tokens,
            **{"use_cache": False, **own},
        )
        return _text(getattr(library, f"{family}ForCausalLM")(config), size)

    return build


def _gemma3(size: Size) -> CompileWorkload:
    library = importlib.import_module("transformers")
    config = library.Gemma3TextConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=2,
        head_dim=size.width // size.heads,
        sliding_window=size.tokens // 2,
        max_position_embeddings=2 * size.tokens,
    )
    return _text(library.Gemma3ForCausalLM(config), size)


def _with_lora(build: Callable[[Size], CompileWorkload]) -> Callable[[Size], CompileWorkload]:
    """The same with adapters of all its linear layers."""

    def adapted(size: Size) -> CompileWorkload:
        peft = importlib.import_module("peft")
        base = build(size)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
        return _text(peft.get_peft_model(base.model, lora), size)

    return adapted


def _in_bfloat16(build: Callable[[Size], CompileWorkload]) -> Callable[[Size], CompileWorkload]:
    """The same with its weights in bfloat16, as checkpoints of large models are loaded."""

    def cast(size: Size) -> CompileWorkload:
        workload = build(size)
        return replace(workload, model=workload.model.to(torch.bfloat16))

    return cast


def _gpt2(size: Size) -> CompileWorkload:
    library = importlib.import_module("transformers")
    config = library.GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=2 * size.tokens,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        use_cache=False,
    )
    return _text(library.GPT2LMHeadModel(config), size)


def _encoder(family: str, **own: Any) -> Callable[[Size], CompileWorkload]:
    def build(size: Size) -> CompileWorkload:
        library = importlib.import_module("transformers")
        config = getattr(library, f"{family}Config")(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=4 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=2 * size.tokens + 8,
            **own,
        )
        return _text(getattr(library, f"{family}ForMaskedLM")(config), size)

    return build


def _distilbert(size: Size) -> CompileWorkload:
    library = importlib.import_module("transformers")
    config = library.DistilBertConfig(
        vocab_size=size.vocabulary,
        dim=size.width,
        hidden_dim=4 * size.width,
        n_layers=size.layers,
        n_heads=size.heads,
        max_position_embeddings=2 * size.tokens,
    )
    return _text(library.DistilBertForMaskedLM(config), size)


def _t5(size: Size) -> CompileWorkload:
    library = importlib.import_module("transformers")
    config = library.T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.width // size.heads,
        d_ff=4 * size.width,
        num_layers=size.layers // 2,
        num_heads=size.heads,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _text(library.T5ForConditionalGeneration(config), size)


def _bart(size: Size) -> CompileWorkload:
    library = importlib.import_module("transformers")
    config = library.BartConfig(
        vocab_size=size.vocabulary,
        d_model=size.width,
        encoder_layers=size.layers // 2,
        decoder_layers=size.layers // 2,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        max_position_embeddings=2 * size.tokens,
        use_cache=False,
    )
    return _text(library.BartForConditionalGeneration(config), size)


def _hf_vit(size: Size) -> CompileWorkload:
    library = importlib.import_module("transformers")
    config = library.ViTConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        image_size=size.image,
        num_labels=100,
    )
    workload = _images(library.ViTForImageClassification(config), size)
    return CompileWorkload(
        workload.model,
        workload.batch,
        lambda m, b: m(pixel_values=b["x"], labels=b["y"]).loss,
        size.samples,
    )


def _vision(name: str) -> Callable[[Size], CompileWorkload]:
    """A classifier of torchvision's or timm's."""

    def build(size: Size) -> CompileWorkload:
        try:
            network = vision_models.load(name, size.image)
        except vision_models.UnknownModelError as error:
            raise ModuleNotFoundError(str(error)) from None
        return _images(network.make(100), size)

    return build


def _unet(size: Size) -> CompileWorkload:
    library = importlib.import_module("diffusers")
    width = 32 if size is ON_CPU else 320
    model = library.UNet2DConditionModel(
        sample_size=size.image // 8,
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        cross_attention_dim=size.width,
        norm_num_groups=8,
    )

    def batch(generator: torch.Generator) -> Batch:
        shape = (size.samples, 4, size.image // 4, size.image // 4)
        return {
            "x": torch.randn(shape, generator=generator),
            "t": torch.randint(0, 1000, (size.samples,), generator=generator),
            "text": torch.randn((size.samples, 77, size.width), generator=generator),
            "noise": torch.randn(shape, generator=generator),
        }

    def loss(m: nn.Module, b: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(m(b["x"], b["t"], b["text"]).sample, b["noise"])

    return CompileWorkload(model, batch, loss, size.samples)


_qwen3_moe = _decoder(
    "Qwen3Moe",
    num_key_value_heads=2,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    output_router_logits=True,
    use_cache=True,
)

SUITES: dict[str, dict[str, Callable[[Size], CompileWorkload]]] = {
    "default": {
        "transformers/llama": _decoder("Llama", num_key_value_heads=2),
        "transformers/qwen2": _decoder("Qwen2", num_key_value_heads=2),
        "transformers/mistral": _decoder("Mistral", num_key_value_heads=2),
        "transformers/gpt-neox": _decoder("GPTNeoX"),
        "transformers/gpt2": _gpt2,
        "transformers/bert": _encoder("Bert"),
        "transformers/roberta": _encoder("Roberta", pad_token_id=1),
        "transformers/electra": _encoder("Electra"),
        "transformers/distilbert": _distilbert,
        "transformers/t5": _t5,
        "transformers/bart": _bart,
        "transformers/vit": _hf_vit,
        "torchvision/resnet50": _vision("torchvision/resnet50"),
        "torchvision/mobilenet_v3_small": _vision("torchvision/mobilenet_v3_small"),
        "torchvision/convnext_tiny": _vision("torchvision/convnext_tiny"),
        "torchvision/swin_t": _vision("torchvision/swin_t"),
        "timm/efficientnet_b0": _vision("timm/efficientnet_b0"),
        "timm/resnetv2_50": _vision("timm/resnetv2_50"),
        "diffusers/unet2d-condition": _unet,
    },
    # As loops of one's own have them: with the cache that they return by default.
    "fine-tuning": {
        "transformers/qwen3-cached": _decoder("Qwen3", num_key_value_heads=2, use_cache=True),
        "transformers/gemma3": _gemma3,
        "peft/llama-lora": _with_lora(_decoder("Llama", num_key_value_heads=2, use_cache=True)),
        "transformers/qwen3-moe-router-logits": _qwen3_moe,
        "transformers/qwen3-moe-bf16-weights": _in_bfloat16(_qwen3_moe),
    },
}
"""Suite -> workload -> what builds it at a size."""


def build(name: str, device: str) -> CompileWorkload:
    """A workload of any suite; raises BenchError naming the package that is missing."""
    for suite in SUITES.values():
        if name in suite:
            try:
                return suite[name](ON_CPU if device == "cpu" else ON_GPU)
            except ModuleNotFoundError as error:
                library = name.partition("/")[0]
                raise BenchError(f"{name}: {error}: pip install {library}") from None
    raise BenchError(f"unknown workload {name!r}; known: {', '.join(SUITES['default'])}")


def names(suite: str) -> list[str]:
    """The workloads of a suite; raises BenchError listing the suites."""
    if suite not in SUITES:
        raise BenchError(f"unknown suite {suite!r}; known: {', '.join(SUITES)}")
    return list(SUITES[suite])
