# SPDX-License-Identifier: Apache-2.0
"""Instruction data: the embedded default, the alpaca reader, the tokenizer, the batches."""

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from deepytorch.recipes._config import RecipeError
from deepytorch_core.data import Packing, plan

# Modules that import without side effects on every platform and document themselves well.
_MODULES = """
    argparse ast asyncio base64 bisect calendar cmd codecs collections collections.abc
    concurrent.futures configparser contextlib copy csv dataclasses datetime decimal difflib dis
    email.message email.utils enum fileinput fnmatch fractions ftplib functools gettext glob
    graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies imaplib inspect io
    ipaddress itertools json linecache locale logging logging.handlers mailbox math mimetypes
    multiprocessing.pool numbers operator optparse os os.path pathlib pickle pickletools pkgutil
    platform plistlib poplib pprint queue quopri random re reprlib sched secrets selectors shelve
    shlex shutil signal smtplib socket socketserver stat statistics string struct subprocess
    tarfile tempfile textwrap threading timeit tokenize trace traceback types typing unicodedata
    unittest unittest.mock urllib.parse urllib.request urllib.robotparser uuid warnings wave
    weakref xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipfile zlib
"""

IGNORED_LABEL = -100  # what cross_entropy(ignore_index=-100) leaves out


@dataclass(frozen=True)
class InstructionPair:
    """One record in alpaca's sense; ``context`` is alpaca's "input" and may be empty."""

    instruction: str
    context: str
    response: str

    def prompt(self) -> str:
        """The text before the answer, which the model reads but is not trained to write."""
        context = f"\n\n### Input:\n{self.context}" if self.context else ""
        return f"### Instruction:\n{self.instruction}{context}\n\n### Response:\n"


@dataclass(frozen=True)
class Example:
    """One encoded pair: token ids, and as many labels with the prompt masked by -100."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class Batch:
    """int64 tensors of shape [batch, longest]; padding has mask 0 and label -100."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    packing: Packing  # where the tokens lie, for models that train without padding

    def to(self, device: torch.device) -> "Batch":
        """The same batch on ``device``."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.packing.to(device, non_blocking=True),
        )

    def counts(self) -> torch.Tensor:
        """float32 [2]: labels that are trained, tokens without padding."""
        # The first label has no token before it to be predicted from.
        trained = (self.labels[:, 1:] != IGNORED_LABEL).sum()
        return torch.stack([trained, self.attention_mask.sum()]).float()


def load_pairs(data: str | None) -> list[InstructionPair]:
    """The pairs in the file ``data``, or the embedded ones when it is None."""
    return standard_library_pairs() if data is None else read_alpaca(Path(data))


def standard_library_pairs() -> list[InstructionPair]:
    """Questions about Python's standard library; the answers are its docstrings.

    Made from the running Python, so nothing is downloaded or shipped: a few thousand pairs of
    real text with a long tail of lengths. The order depends only on the names, never on hashing.
    """
    pairs: list[InstructionPair] = []
    seen: set[str] = set()
    for module_name in _MODULES.split():
        for name, thing in _public_objects(importlib.import_module(module_name)):
            origin = getattr(thing, "__module__", None) or module_name
            if origin.partition(".")[0] not in sys.stdlib_module_names:
                continue  # added to the module by another library
            response = inspect.getdoc(thing)
            if not response or len(response) < 20 or response in seen:
                continue
            try:
                signature = str(inspect.signature(thing))
            except (TypeError, ValueError):
                continue  # builtins without a text signature
            if " at 0x" in signature or "frozenset(" in signature:
                continue  # an address or a hash order: would differ between the ranks
            seen.add(response)
            question = f"What does `{module_name}.{name}{signature}` do?"
            pairs.append(InstructionPair(question, "", response))
    return pairs


def _public_objects(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """(dotted name, object) of the module's public functions, classes and methods, sorted."""
    for name in sorted(getattr(module, "__all__", None) or vars(module)):
        thing = getattr(module, name, None)
        if name.startswith("_") or not (inspect.isroutine(thing) or inspect.isclass(thing)):
            continue
        yield name, thing
        if inspect.isclass(thing):
            for member, value in sorted(vars(thing).items()):
                if not member.startswith("_") and inspect.isroutine(value):
                    yield f"{name}.{member}", getattr(thing, member)


def read_alpaca(path: Path) -> list[InstructionPair]:
    """Read alpaca-format data: a JSON list, or one JSON object a line when it ends in .jsonl.

    Each record has "instruction" and "output", and may have "input". Raises RecipeError naming
    the file, the record (counted from 0, or the line from 1) and the field that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read data={path}: {error}") from error
    if path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        records = [(f"line {number}", _parse_json(line, path, number)) for number, line in lines]
    else:
        loaded = _parse_json(text, path, 1)
        if not isinstance(loaded, list):
            raise RecipeError(
                f"{path} must hold a JSON list of records, not a {type(loaded).__name__} "
                "(one record a line is read from a file that ends in .jsonl)"
            )
        records = [(f"record {index}", record) for index, record in enumerate(loaded)]
    if not records:
        raise RecipeError(f"{path} holds no records")
    return [_alpaca_record(record, f"{path}, {where}") for where, record in records]


def _parse_json(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise RecipeError(
            f"{path} is not valid JSON at line {line}, column {error.colno}: {error.msg}"
        ) from error


def _alpaca_record(record: Any, where: str) -> InstructionPair:
    if not isinstance(record, dict):
        raise RecipeError(f"{where}: expected an object, found a {type(record).__name__}")
    values = {}
    for field, required in (("instruction", True), ("input", False), ("output", True)):
        value = record.get(field)
        if value is None and not required:
            value = ""
        if not isinstance(value, str):
            problem = f"is a {type(value).__name__}" if field in record else "is missing"
            raise RecipeError(
                f'{where}: field "{field}" {problem}; it must be a text. '
                f"Fields found: {', '.join(map(str, record)) or 'none'}"
            )
        if required and not value.strip():
            raise RecipeError(f'{where}: field "{field}" is empty')
        values[field] = value
    return InstructionPair(values["instruction"], values["input"], values["output"])


def byte_tokenizer() -> Any:
    """A transformers tokenizer of 256 bytes and <pad>, <s>, </s>; needs no vocabulary file.

    It is byte-level BPE without merges, so it saves and loads like any other fast tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    fast_tokenizer: Any = PreTrainedTokenizerFast
    specials = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return fast_tokenizer(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def encode(pair: InstructionPair, tokenizer: Any, max_length: int) -> tuple[Example, bool]:
    """Encode a pair; True when it had to be cut to ``max_length`` tokens.

    The prompt's labels are masked; the answer's, and the end token after it, are trained.
    """
    prompt = tokenizer(pair.prompt())["input_ids"]
    response = tokenizer(pair.response, add_special_tokens=False)["input_ids"]
    ids = [*prompt, *response, tokenizer.eos_token_id]
    labels = [*([IGNORED_LABEL] * len(prompt)), *ids[len(prompt) :]]
    return Example(ids[:max_length], labels[:max_length]), len(ids) > max_length


def encode_all(
    pairs: list[InstructionPair], tokenizer: Any, max_length: int
) -> tuple[list[Example], str]:
    """Encode every pair, leaving out those whose prompt alone fills ``max_length``.

    Also returns one sentence with the counts. Raises RecipeError when nothing is left.
    """
    examples: list[Example] = []
    num_truncated = 0
    for pair in pairs:
        example, truncated = encode(pair, tokenizer, max_length)
        if any(label != IGNORED_LABEL for label in example.labels):
            examples.append(example)
            num_truncated += truncated
    if not examples:
        raise RecipeError(f"no answer begins within max_length={max_length} tokens: increase it")
    lengths = sorted(len(example.input_ids) for example in examples)
    summary = (
        f"{len(examples)} examples, median {lengths[len(lengths) // 2]} tokens, longest "
        f"{lengths[-1]}; {num_truncated} truncated to max_length={max_length}, "
        f"{len(pairs) - len(examples)} left out because their prompt alone is longer"
    )
    return examples, summary


def collate(examples: list[Example], pad_token_id: int) -> Batch:
    """Pad to the longest example of the batch."""
    longest = max(len(example.input_ids) for example in examples)

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    attention_mask = padded([[1] * len(example.input_ids) for example in examples], 0)
    labels = padded([example.labels for example in examples], IGNORED_LABEL)
    return Batch(
        input_ids=padded([example.input_ids for example in examples], pad_token_id),
        attention_mask=attention_mask,
        labels=labels,
        packing=plan(attention_mask, labels),
    )


def endless_batches(
    examples: list[Example],
    pad_token_id: int,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    seed: int,
) -> Iterator[Batch]:
    """This rank's batches for ever, reshuffled every epoch; the order depends on ``seed`` only.

    Raises RecipeError when there are too few examples to give every rank one batch.
    """
    if len(examples) < batch_size * world_size:
        raise RecipeError(
            f"{len(examples)} examples are too few for batch_size={batch_size} on {world_size} "
            "processes: lower batch_size or add data"
        )
    dataset = cast(Dataset[Example], examples)  # a list has all that a Dataset needs
    sampler: DistributedSampler[Example] = DistributedSampler(
        dataset, num_replicas=world_size, rank=rank, seed=seed, drop_last=True
    )
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=True,
        collate_fn=lambda chosen: collate(chosen, pad_token_id),
    )

    def batches() -> Iterator[Batch]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    return batches()
