"""Register scripts of transformers and TRL, on models of random weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepytorch.workloads.scripts import text
from deepytorch.workloads.scripts.script import Prepare, Script, Size

_TRL = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
_RUN_CLM = "00d481d18f914b55e65faa31e82321629691eadb"
_RUN_MLM = "049d2bf1220747b6d39e2a978b9f5fe0defa1dca"
_RUN_GLUE = "005c23ae8f6dca810fa2a0e5cecabe0cfb24aaf3"

_LANGUAGE = ("transformers", "datasets", "evaluate", "sklearn")
_STEPS = ("--max_steps=1000000", "--save_strategy=no", "--report_to=none", "--output_dir={out}")
_LLAMA: dict[Size, dict[str, Any]] = {
    "full": {
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000},
    },
    "small": {
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    },
}
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


def _save(folder: Path, build: Callable[[], Any]) -> None:
    import torch

    torch.manual_seed(text.SEED)
    build().save_pretrained(folder)


def _llama(folder: Path, size: Size) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = _LLAMA[size]
    made = text.tokenizer(folder, vocabulary=min(5_000, shape["vocab_size"]), longest=1024)
    config: Any = LlamaConfig(
        **shape,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=made.bos_token_id,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
    )
    llama: Any = LlamaForCausalLM
    _save(folder, lambda: llama(config).to(torch.bfloat16))


def _sft(folder: Path, size: Size) -> None:
    _llama(folder / "model", size)
    rows, longest = (6_000, 1024) if size == "full" else (64, 32)
    (folder / "rows").mkdir()
    written = ({"text": sample} for sample in text.ragged(rows, longest))
    text.write_rows(folder / "rows" / "train.jsonl", written)


def _dpo(folder: Path, size: Size) -> None:
    _llama(folder / "model", size)
    rows, longest = (6_000, 400) if size == "full" else (64, 16)
    (folder / "rows").mkdir()
    three = (text.ragged(rows, longest, seed) for seed in range(3))
    written = (
        {"prompt": asked, "chosen": good, "rejected": bad}
        for asked, good, bad in zip(*three, strict=True)
    )
    text.write_rows(folder / "rows" / "train.jsonl", written)


def _bert(folder: Path, size: Size) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config: Any = BertConfig(**_BERT[size])
    text.tokenizer(folder, vocabulary=config.vocab_size, longest=512, is_bert=True)
    _save(folder, lambda: BertForMaskedLM(config))


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
    _save(folder / "model", lambda: GPT2LMHeadModel(config))
    _write_text(folder, size)


def _write_text(folder: Path, size: Size) -> None:
    rows = text.lines(40_000 if size == "full" else 400, 60)
    (folder / "train.txt").write_text("\n".join(rows), encoding="utf-8")


def _glue(folder: Path, size: Size) -> None:
    _bert(folder / "model", size)
    (folder / "accuracy").mkdir()
    (folder / "accuracy" / "accuracy.py").write_text(_ACCURACY, encoding="utf-8")
    generator = random.Random(text.SEED)
    for split, rows in (("train", 8_000), ("validation", 400)):
        rows = rows if size == "full" else rows // 40
        pairs = zip(text.lines(rows, 20, 1), text.lines(rows, 20, 2), strict=True)
        written = (
            {"sentence1": first, "sentence2": second, "label": generator.randrange(2)}
            for first, second in pairs
        )
        text.write_rows(folder / f"{split}.json", written)


def _trl(name: str, path: str, prepare: Prepare, *more: str) -> Script:
    both = ("--model_name_or_path={data}/model", "--dataset_name={data}/rows", *_STEPS, *more)
    return Script(
        name=name,
        repository="huggingface/trl",
        commit=_TRL,
        path=path,
        arguments=(*both, "--per_device_train_batch_size=8", "--bf16=True"),
        small=(
            *(*both, "--per_device_train_batch_size=2", "--use_cpu", "--bf16=False"),
            "--max_length=64",
        ),
        prepare=prepare,
        packages=("trl", "transformers", "datasets", *(["peft"] if "--use_peft" in more else [])),
        is_distributed=True,
    )


def _trainers(
    name: str, commit: str, path: str, prepare: Prepare, *more: str
) -> tuple[Script, ...]:
    """Register a script of transformers' with its page's arguments, and in bfloat16."""
    both = ("--model_name_or_path={data}/model", "--do_train", *_STEPS)
    small = (*both, *more, "--per_device_train_batch_size=2", "--use_cpu")

    def of(name: str, *precision: str) -> Script:
        return Script(
            name=name,
            repository="huggingface/transformers",
            commit=commit,
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
# Weights in bfloat16 and no recomputation, as the engines that it is compared with train it.
_PLAIN = ("--dtype=bfloat16", "--gradient_checkpointing=False")
SCRIPTS = (
    _trl("trl-sft-llama-1b", "trl/scripts/sft.py", _sft, "--learning_rate=2.0e-5", *_PLAIN),
    _trl("trl-sft-llama-1b-defaults", "trl/scripts/sft.py", _sft, "--learning_rate=2.0e-5"),
    _trl(
        *("trl-sft-llama-1b-lora", "trl/scripts/sft.py", _sft, "--learning_rate=2.0e-4"),
        *("--use_peft", "--lora_r=32", "--lora_alpha=16", *_PLAIN),
    ),
    _trl("trl-dpo-llama-1b", "trl/scripts/dpo.py", _dpo, "--learning_rate=5.0e-7", *_PLAIN),
    *_trainers(
        *("run-mlm-bert", _RUN_MLM, "language-modeling/run_mlm.py", _mlm, _TEXT),
        *("--per_device_train_batch_size=8", "--max_seq_length=512"),
    ),
    *_trainers(
        *("run-clm-gpt2", _RUN_CLM, "language-modeling/run_clm.py", _clm, _TEXT),
        *("--per_device_train_batch_size=8", "--block_size=1024"),
    ),
    *_trainers(
        *("run-glue-bert", _RUN_GLUE, "text-classification/run_glue.py", _glue),
        *("--train_file={data}/train.json", "--validation_file={data}/validation.json"),
        *("--max_seq_length=128", "--per_device_train_batch_size=32", "--learning_rate=2e-5"),
    ),
)
