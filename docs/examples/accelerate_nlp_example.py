"""Accelerate's NLP example in its usual form: a sequence classifier, trained and evaluated.

A small BERT learns whether the second sentence says the same as the first. Sentences, tokenizer and
weights are made here, so nothing is downloaded. One line makes it run on deepytorch; it is marked.

    deepytorch run --nproc-per-node 2 docs/examples/accelerate_nlp_example.py --cpu
"""

import argparse
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

import deepytorch  # noqa: F401  the one line: collectives go through deepytorch from here on

MAX_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 32

SUBJECTS = {"boy": "lad", "woman": "lady", "dog": "hound", "car": "automobile"}
VERBS = {"saw": "noticed", "liked": "loved", "followed": "chased", "left": "abandoned"}


def make_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """(sentence, sentence, whether they say the same): the second one in other words."""
    rng = random.Random(seed)
    pairs = []
    for index in range(count):
        subject, other = rng.sample(list(SUBJECTS), 2)
        verb = rng.choice(list(VERBS))
        same = index % 2
        said = VERBS[verb] if same else f"never {VERBS[verb]}"
        pairs.append(
            (
                f"the {subject} {verb} the {other}",
                f"the {SUBJECTS[subject]} {said} the {other}",
                same,
            )
        )
    return pairs


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["the", "never", *SUBJECTS, *SUBJECTS.values(), *VERBS, *VERBS.values()]
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
    for word in words:
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")


def get_dataloaders(
    accelerator: Accelerator, batch_size: int
) -> tuple[DataLoader, DataLoader, int]:
    """Build the training and the evaluation data loader."""
    tokenizer = make_tokenizer()

    def collate_fn(examples: list[tuple[str, str, int]]) -> BatchEncoding:
        first, second, labels = zip(*examples, strict=True)
        pad_to_multiple_of = 8 if accelerator.mixed_precision != "no" else None
        batch = tokenizer(
            list(first),
            list(second),
            padding="longest",
            pad_to_multiple_of=pad_to_multiple_of,
            return_token_type_ids=True,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor(labels)
        return batch

    train_dataloader = DataLoader(
        make_pairs(768, seed=1), shuffle=True, collate_fn=collate_fn, batch_size=batch_size
    )
    eval_dataloader = DataLoader(
        make_pairs(190, seed=2), shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE
    )
    return train_dataloader, eval_dataloader, len(tokenizer)


def training_function(config: dict[str, float], args: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    lr, num_epochs = config["lr"], int(config["num_epochs"])
    batch_size = int(config["batch_size"])

    # A batch that is too large for the device is cut into several, whose gradients add up.
    gradient_accumulation_steps = 1
    if batch_size > MAX_BATCH_SIZE:
        gradient_accumulation_steps = batch_size // MAX_BATCH_SIZE
        batch_size = MAX_BATCH_SIZE

    set_seed(int(config["seed"]))
    train_dataloader, eval_dataloader, vocab_size = get_dataloaders(accelerator, batch_size)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=32,
        )
    )
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=20,
        num_training_steps=(len(train_dataloader) * num_epochs) // gradient_accumulation_steps,
    )

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            outputs = model(**batch)
            loss = outputs.loss / gradient_accumulation_steps
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        right = total = 0
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / total:.4f} of {total}")
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description="Simple example of a training script.")
    parser.add_argument(
        "--mixed_precision",
        type=str,
        default=None,
        choices=["no", "fp16", "bf16", "fp8"],
        help="Whether to use mixed precision; bf16 needs a device that has it.",
    )
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    args = parser.parse_args()
    config = {"lr": 1e-3, "num_epochs": 3, "seed": 42, "batch_size": 16}
    training_function(config, args)


if __name__ == "__main__":
    main()
