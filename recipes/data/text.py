# SPDX-License-Identifier: Apache-2.0
"""Instruction data: the embedded default, its tokenizer, and padded batches."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from deepytorch.recipes.data.conversations import InstructionPair
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
class Example:
    """One encoded pair: token ids, and as many labels with the prompt masked by -100."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True)
class TextBatch:
    """int64 tensors of shape [batch, longest]; padding has mask 0 and label -100."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    packing: Packing  # where the tokens lie, for models that train without padding
    shifted: bool = True  # the label at a place is predicted from the tokens before it

    def to(self, device: torch.device) -> "TextBatch":
        """The same batch on ``device``."""
        return TextBatch(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.packing.to(device, non_blocking=True),
            self.shifted,
        )

    def counts(self) -> torch.Tensor:
        """float32 [2]: labels that are trained, tokens without padding."""
        # The first label has no token before it to be predicted from.
        labels = self.labels[:, 1:] if self.shifted else self.labels
        trained = (labels != IGNORED_LABEL).sum()
        return torch.stack([trained, self.attention_mask.sum()]).float()


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


def collate(examples: list[Example], pad_token_id: int, *, shifted: bool = True) -> TextBatch:
    """Pad to the longest example of the batch."""
    longest = max(len(example.input_ids) for example in examples)

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    attention_mask = padded([[1] * len(example.input_ids) for example in examples], 0)
    labels = padded([example.labels for example in examples], IGNORED_LABEL)
    return TextBatch(
        input_ids=padded([example.input_ids for example in examples], pad_token_id),
        attention_mask=attention_mask,
        labels=labels,
        packing=plan(attention_mask, labels, shifted=shifted),
        shifted=shifted,
    )
