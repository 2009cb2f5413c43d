"""Register scripts with models of their own, in plain PyTorch loops."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from deepytorch.workloads.scripts import images, text
from deepytorch.workloads.scripts.script import Script, Size

_NANO_GPT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
_MIN_GPT = "37baab71b9abea1b76ab957409a1cc2fbfba8a26"
_MAKEMORE = "988aa59e4d8fefa526d06f3b453ad116258398d4"
_EXAMPLES = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_X_TRANSFORMERS = "9252ed7838021ee61e6c5be0930b3a9a88efdf06"
_UNET = "21d7850f2af30a9695bbeea75f3136aa538cfc4a"
_GCN = "1600b5b748b3976413d1e307540ccc62605b4d6d"
_CLEAN_RL = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"

_GPT2_VOCABULARY = 50_257
# The script takes a piece of 90 MB for training and what is left for validation.
_ENWIK8_BYTES = 91_000_000
_CORA = {"full": (2_708, 1_433, 5_429), "small": (1_600, 32, 3_000)}
"""Tells numbers of papers, words and citations; the script takes papers up to number 1,500."""


def _nothing(folder: Path, size: Size) -> None:
    """Leave the folder empty: the script has its data with it."""


def _tokens(folder: Path, size: Size) -> None:
    for split, count in (("train", 10_000_000), ("val", 1_000_000)):
        count = count if size == "full" else count // 1_000
        text.write_tokens(folder / f"{split}.bin", count, _GPT2_VOCABULARY)


def _characters(folder: Path, size: Size) -> None:
    # The script begins its samples with these words, so their letters must occur.
    rows = text.lines(20_000 if size == "full" else 200, 10)
    (folder / "input.txt").write_text("\n".join(["O God, O God!", *rows]), encoding="utf-8")


def _words(folder: Path, size: Size) -> None:
    count = 40_000 if size == "full" else 400
    for split, rows in (("train", count), ("valid", count // 10), ("test", count // 10)):
        content = "\n".join(text.lines(rows, 50, seed=rows))
        (folder / f"{split}.txt").write_text(content, encoding="utf-8")


def _mnist(folder: Path, size: Size) -> None:
    (folder / "work").mkdir()
    images.mnist(folder / "data", size)


def _enwik8(folder: Path, size: Size) -> None:
    (folder / "data").mkdir()
    piece = " ".join(text.words(100_000)).encode()
    with gzip.open(folder / "data" / "enwik8.gz", "wb", compresslevel=1) as file:
        file.write((piece * (_ENWIK8_BYTES // len(piece) + 1))[:_ENWIK8_BYTES])


def _masked_images(folder: Path, size: Size) -> None:
    import numpy
    from PIL import Image

    count, pixels = (400, 960) if size == "full" else (12, 64)
    pictures, masks = folder / "data" / "imgs", folder / "data" / "masks"
    masks.mkdir(parents=True)
    images.jpegs(lambda number: pictures / f"{number:04d}.jpg", count, pixels)
    mask = numpy.zeros((pixels, pixels), dtype=numpy.uint8)
    for number in range(count):
        mask[:, : pixels * (number + 1) // count] = 255
        Image.fromarray(mask).save(masks / f"{number:04d}_mask.png")


def _citations(folder: Path, size: Size) -> None:
    papers, number_of_words, citations = _CORA[size]
    place = folder / "data" / "cora"
    place.mkdir(parents=True)
    (folder / "work").mkdir()
    generator = random.Random(text.SEED)
    with (place / "cora.content").open("w", encoding="utf-8") as file:
        for paper in range(papers):
            marks = (str(int(generator.random() < 0.02)) for _ in range(number_of_words))
            file.write("\t".join([str(paper), *marks, f"Class_{paper % 7}"]) + "\n")
    with (place / "cora.cites").open("w", encoding="utf-8") as file:
        for _ in range(citations):
            file.write(f"{generator.randrange(papers)}\t{generator.randrange(papers)}\n")


def _nano_gpt(name: str, *, compile: bool) -> Script:
    common = (
        *("--dataset={data}", "--out_dir={out}", "--gradient_accumulation_steps=1"),
        *("--eval_interval=1000000", "--eval_iters=1"),
    )
    tiny = ("n_layer=2", "n_head=2", "n_embd=32", "block_size=32", "batch_size=4")
    return Script(
        name=name,
        repository="karpathy/nanoGPT",
        commit=_NANO_GPT,
        path="train.py",
        arguments=(
            *common,
            *("--batch_size=12", "--block_size=1024", "--device=cuda", "--dtype=bfloat16"),
            f"--compile={compile}",
        ),
        small=(
            *common,
            *(f"--{option}" for option in tiny),
            *("--device=cpu", "--dtype=float32", f"--compile={compile}"),
        ),
        prepare=_tokens,
    )


SCRIPTS = (
    _nano_gpt("nanogpt", compile=False),
    _nano_gpt("nanogpt-compile", compile=True),
    Script(
        name="mingpt-chargpt",
        repository="karpathy/minGPT",
        commit=_MIN_GPT,
        path="projects/chargpt/chargpt.py",
        arguments=("--system.work_dir={out}",),
        small=(
            *("--system.work_dir={out}", "--model.model_type=gpt-nano", "--trainer.batch_size=4"),
            *("--data.block_size=16", "--trainer.num_workers=0"),
        ),
        prepare=_characters,
        folder="{data}",
        variables={"PYTHONPATH": "{checkout}"},
    ),
    Script(
        name="makemore",
        repository="karpathy/makemore",
        commit=_MAKEMORE,
        path="makemore.py",
        arguments=("--input-file=names.txt", "--work-dir={out}", "--device=cuda"),
        small=(
            *("--input-file=names.txt", "--work-dir={out}", "--device=cpu", "--num-workers=0"),
            *("--n-layer=1", "--n-head=2", "--n-embd=16", "--n-embd2=16", "--batch-size=4"),
        ),
        prepare=_nothing,
        packages=("tensorboard",),
    ),
    Script(
        name="pytorch-mnist",
        repository="pytorch/examples",
        commit=_EXAMPLES,
        path="mnist/main.py",
        arguments=("--epochs=1000",),
        small=("--epochs=1000", "--no-accel"),
        prepare=_mnist,
        packages=("torchvision",),
        folder="{data}/work",
    ),
    Script(
        name="pytorch-imagenet-resnet50",
        repository="pytorch/examples",
        commit=_EXAMPLES,
        path="imagenet/main.py",
        arguments=("--arch=resnet50", "--dummy", "--gpu=0"),
        small=("--arch=resnet18", "--dummy", "--no-accel", "--batch-size=2", "--workers=0"),
        prepare=_nothing,
        packages=("torchvision",),
        folder="{data}",
    ),
    Script(
        name="pytorch-word-language-model",
        repository="pytorch/examples",
        commit=_EXAMPLES,
        path="word_language_model/main.py",
        # Without --use-optimizer the script adds gradients by hand, and no step could be timed.
        arguments=(
            *("--data={data}", "--accel", "--epochs=1000", "--model=Transformer"),
            *("--use-optimizer", "--lr=0.001"),
        ),
        small=(
            *("--data={data}", "--epochs=1000", "--model=Transformer", "--use-optimizer"),
            *("--lr=0.001", "--emsize=16", "--nhid=16", "--batch_size=4"),
        ),
        prepare=_words,
    ),
    Script(
        name="x-transformers-enwik8",
        repository="lucidrains/x-transformers",
        commit=_X_TRANSFORMERS,
        path="train_enwik8.py",
        arguments=("--generate_length=64",),
        small=("--generate_length=8", "--seq_len=32", "--batch_size=1", "--cpu=True"),
        prepare=_enwik8,
        packages=("x_transformers", "accelerate", "fire", "wandb"),
        folder="{data}",
    ),
    Script(
        name="pytorch-unet",
        repository="milesial/Pytorch-UNet",
        commit=_UNET,
        path="train.py",
        arguments=("--amp", "--epochs=1000", "--batch-size=4", "--scale=0.5"),
        small=("--epochs=1000", "--batch-size=1", "--scale=0.5"),
        prepare=_masked_images,
        packages=("torchvision", "wandb"),
        folder="{data}",
    ),
    Script(
        name="pygcn",
        repository="tkipf/pygcn",
        commit=_GCN,
        path="pygcn/train.py",
        arguments=("--epochs=1000000",),
        small=("--epochs=1000000", "--no-cuda"),
        prepare=_citations,
        packages=("scipy",),
        folder="{data}/work",
        variables={"PYTHONPATH": "{checkout}"},
    ),
    Script(
        name="cleanrl-ppo",
        repository="vwxyzjn/cleanrl",
        commit=_CLEAN_RL,
        path="cleanrl/ppo.py",
        arguments=("--env-id=CartPole-v1", "--total-timesteps=100000000"),
        small=("--env-id=CartPole-v1", "--total-timesteps=100000000", "--no-cuda"),
        prepare=_nothing,
        packages=("gymnasium", "tyro", "tensorboard"),
        folder="{data}",
    ),
)
