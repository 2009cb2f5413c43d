# SPDX-License-Identifier: Apache-2.0
"""Ready training recipes: linear scripts to run as they are, or to copy and change.

Each recipe is a module with ``main(argv) -> int``, started with torchrun or alone::

    torchrun --nproc-per-node 2 -m deepytorch.recipes.llama_sft --compare steps=40

``deepytorch train NAME`` starts the same module. Nothing heavy is imported here, so that the
command can list the recipes at once.
"""

RECIPES: dict[str, str] = {
    "llama_sft": "deepytorch.recipes.llama_sft",
    "qwen_lora": "deepytorch.recipes.qwen_lora",
    "dpo": "deepytorch.recipes.dpo",
    "stable_diffusion_dreambooth": "deepytorch.recipes.stable_diffusion_dreambooth",
    "resnet50_ddp": "deepytorch.recipes.resnet50_ddp",
    "bert_mlm": "deepytorch.recipes.bert_mlm",
}

DESCRIPTIONS: dict[str, str] = {
    "llama_sft": "full fine-tune of a Llama-class model on instructions",
    "qwen_lora": "LoRA (or full) fine-tune of a Qwen-class chat model",
    "dpo": "LoRA (or full) training of a chat model on preferred answers",
    "stable_diffusion_dreambooth": "DreamBooth: UNet or LoRA, with prior preservation",
    "resnet50_ddp": "an image classifier: ResNet-50, or any other of torchvision and timm",
    "bert_mlm": "masked language modelling with a BERT-class model",
}

__all__ = ["DESCRIPTIONS", "RECIPES"]
