"""Register scripts of transformers, on models of random weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepytorch.workloads.scripts import text
from deepytorch.workloads.scripts.script import Prepare, Script, Size

_TRANSFORMERS = "6c6f70cb9da270c871d1a2177cf7af90faa5c418"

_LANGUAGE = ("transformers", "datasets", "evaluate", "sklearn")
STEPS = ("--max_steps=1000000", "--save_strategy=no", "--report_to=none", "--output_dir={out}")
_BERT: dict[Size, dict[str, Any]] = {
    "full": {"vocab_size": 30_522},
    "small": {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "vocab_size": 512},
    },
}
_GPT2: dict[Size, dict[str, Any]] = {
    "full": {"vocab_size": 50_257},
    "small": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512},
}
# The script loads it by its name, and evaluate takes a folder of that name where it runs.
_ACCURACY = '''
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """The share of predictions that are right."""

    def _info(self):
        one = datasets.Value("int32")
        return evaluate.MetricInfo(
            description="accuracy",
            citation="",
            features=datasets.Features({"predictions": one, "references": one}),
        )

    def _compute(self, predictions, references):
        right = sum(a == b for a, b in zip(predictions, references))
        return {"accuracy": right / max(1, len(references))}
'''


def save(folder: Path, build: Callable[[], Any]) -> None:
    """Save a model with weights that are the same each time."""
    import torch

    torch.manual_seed(text.SEED)
    build().save_pretrained(folder)


def _bert(folder: Path, size: Size) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config: Any = BertConfig(**_BERT[size])
    text.tokenizer(folder, vocabulary=config.vocab_size, longest=512, is_bert=True)
    save(folder, lambda: BertForMaskedLM(config))


def _mlm(folder: Path, size: Size) -> None:
    _bert(folder / "model", size)
    _write_text(folder, size)


def _clm(folder: Path, size: Size) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = _GPT2[size]
    made = text.tokenizer(folder / "model", vocabulary=shape["vocab_size"], longest=1024)
    config: Any = GPT2Config(
        **shape, bos_token_id=made.bos_token_id, eos_token_id=made.eos_token_id
    )
    save(folder / "model", lambda: GPT2LMHeadModel(config))
    _write_text(folder, size)


def _write_text(folder: Path, size: Size) -> None:
    rows = text.lines(40_000 if size == "full" else 400, 60)
    (folder / "train.txt").write_text("\n".join(rows), encoding="utf-8")


# Words, as configurations of models take names of labels alone.
_LABELS = ("different", "alike")


def _glue(folder: Path, size: Size) -> None:
    _bert(folder / "model", size)
    (folder / "accuracy").mkdir()
    (folder / "accuracy" / "accuracy.py").write_text(_ACCURACY, encoding="utf-8")
    generator = random.Random(text.SEED)
    for split, rows in (("train", 8_000), ("validation", 400)):
        rows = rows if size == "full" else rows // 40
        pairs = zip(text.lines(rows, 20, 1), text.lines(rows, 20, 2), strict=True)
        written = (
            {"sentence1": first, "sentence2": second, "label": generator.choice(_LABELS)}
            for first, second in pairs
        )
        text.write_rows(folder / f"{split}.json", written)


def _trainers(name: str, path: str, prepare: Prepare, *more: str) -> tuple[Script, ...]:
    """Register a script of transformers' with its page's arguments, and in bfloat16."""
    both = ("--model_name_or_path={data}/model", "--do_train", *STEPS)
    small = (*both, *more, "--per_device_train_batch_size=2", "--use_cpu")

    def of(name: str, *precision: str) -> Script:
        return Script(
            name=name,
            repository="huggingface/transformers",
            commit=_TRANSFORMERS,
            path=f"examples/pytorch/{path}",
            arguments=(*both, *more, *precision),
            small=(*small, *precision),
            prepare=prepare,
            packages=_LANGUAGE,
            folder="{data}",
            is_distributed=True,
        )

    return of(name), of(f"{name}-bf16", "--bf16")


_TEXT = "--train_file={data}/train.txt"
SCRIPTS = (
    *_trainers(
        *("run-mlm-bert", "language-modeling/run_mlm.py", _mlm, _TEXT),
        *("--per_device_train_batch_size=8", "--max_seq_length=512"),
    ),
    *_trainers(
        *("run-clm-gpt2", "language-modeling/run_clm.py", _clm, _TEXT),
        *("--per_device_train_batch_size=8", "--block_size=1024"),
    ),
    *_trainers(
        *("run-glue-bert", "text-classification/run_glue.py", _glue),
        *("--train_file={data}/train.json", "--validation_file={data}/validation.json"),
        *("--max_seq_length=128", "--per_device_train_batch_size=32", "--learning_rate=2e-5"),
    ),
)
