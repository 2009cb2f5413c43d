"""Keeps outputs of frozen encoders, computed once: latents of images, embeddings of texts.

A frozen encoder gives the same for the same sample in every epoch. A cache keeps that output by
sample (and crop), in memory. With a folder the output is also on disk, for the next run and the
other ranks of the node. For a VAE the mean and the standard deviation of its posterior are kept. A
latent is drawn from them in every step, as stock scripts do: keeping one drawn latent would train
on less variety.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepytorch_core.base import decisions
from deepytorch_core.base.console import say_once
from deepytorch_core.base.file_permissions import why_not_believed
from deepytorch_core.data import entry_file

Encoded = dict[str, torch.Tensor]
"""Tensors by name; dimension 0 is the samples'."""

_FORMAT = 2
# Lookups after which a cache that hardly ever hits says so.
_JUDGED = 2000
_LEAST_HITS = 0.1


class EncoderCache:
    """Outputs of a frozen encoder, by sample.

    Args:
        name: for reports: "VAE latents".
        encoder: what computes; its weights tell whether files on disk still hold. It must be in
            eval mode and take no gradients, or outputs would not be the same each time.
        folder: where to keep outputs between runs; None: in memory only. Several ranks and runs of
            one user may share it; a file appears whole or not at all. Files that another user owns
            or anybody can write are computed again.
        memory_bytes: how much to hold in host memory; the least recently used go first.

    Raises ValueError for an encoder that is not frozen.
    """

    def __init__(
        self,
        name: str,
        encoder: nn.Module,
        *,
        folder: str | Path | None = None,
        memory_bytes: int = 4 << 30,
    ) -> None:
        _require_frozen(name, encoder)
        self.name = name
        self.hits = 0
        self.misses = 0
        self._encoder = encoder
        self._versions = _versions(encoder)
        self._memory: dict[str, Encoded] = {}
        self._limit, self._used = memory_bytes, 0
        self._folder: Path | None = None
        self._judged = self._said = False
        if folder is not None:
            own = Path(folder) / fingerprint(encoder)
            try:
                own.mkdir(mode=entry_file.FOLDER_MODE, parents=True, exist_ok=True)
                reason = why_not_believed(own)
            except OSError as error:
                reason = f"{own} can't be made: {error}"
            if reason is None:
                self._folder = own
            else:
                say_once(f"{name}: kept in memory only: {reason}", level="warning")

    def get(
        self,
        keys: Sequence[Hashable],
        encode: Callable[[list[int]], Encoded],
        *,
        device: torch.device | str | None = None,
    ) -> Encoded:
        """The outputs for `keys`, computing those that are not there.

        Args:
            keys: what identifies each sample, all that its output depends on: its index or path,
                the crop, the size, the flip. Texts, numbers and tuples of them.
            encode: called with the positions in `keys` of what is missing, in order; returns its
                outputs, dimension 0 over these positions. Not called if nothing is missing. Runs
                without gradients. So it needs to load only the images that it is asked for. Called
                again for the rest where what is kept has other names, dtypes or dimensions.
            device: where the outputs go; default: the encoder's.

        Returns tensors by name, dimension 0 over `keys`, without gradients. They have no storage
        in common with what is kept. Raises ValueError when samples' outputs differ in shape, and
        RuntimeError when the encoder's weights have changed since the cache was made.
        """
        self._require_unchanged()
        wanted = [_digest(key) for key in keys]
        found: dict[str, Encoded] = {}
        for digest in dict.fromkeys(wanted):
            entry = self._look_up(digest)
            if entry is not None:
                found[digest] = entry
        # A sample that is twice in the batch is computed once.
        missing = {digest: place for place, digest in enumerate(wanted) if digest not in found}
        places = sorted(missing.values())
        self.hits += len(keys) - len(places)
        self.misses += len(places)
        if places:
            found.update(self._compute([wanted[place] for place in places], places, encode))
        made = {wanted[place] for place in places}
        kept = {digest: place for place, digest in enumerate(wanted) if digest not in made}
        if kept and len({_form(entry) for entry in found.values()}) > 1:
            # Written by a script that gave other outputs: what `encode` gives now is right.
            self._say_computed_again("what is kept of some samples has other outputs")
            places = sorted(kept.values())
            self.hits -= len(places)
            self.misses += len(places)
            found.update(self._compute([wanted[place] for place in places], places, encode))
        self._judge()
        return self._stacked([found[digest] for digest in wanted], device)

    def _compute(
        self, digests: list[str], places: list[int], encode: Callable[[list[int]], Encoded]
    ) -> dict[str, Encoded]:
        with torch.no_grad():
            outputs = encode(places)
        for name, value in outputs.items():
            if len(value) != len(places):
                raise ValueError(
                    f"{self.name}: encode returned {len(value)} rows of {name!r} for "
                    f"{len(places)} positions"
                )
        made = {}
        for row, digest in enumerate(digests):
            # A copy each, or a kept row would keep its whole batch.
            entry = {name: value[row].detach().cpu().clone() for name, value in outputs.items()}
            self._remember(digest, entry)
            self._write(digest, entry)
            made[digest] = entry
        return made

    def _stacked(self, entries: list[Encoded], device: torch.device | str | None) -> Encoded:
        where = device or next(self._encoder.parameters()).device
        stacked = {}
        forms = {_form(entry) for entry in entries}
        if len(forms) > 1:
            raise ValueError(
                f"{self.name}: encode gives outputs of different names, dtypes or dimensions in "
                f"one batch: {' and '.join(map(str, sorted(forms)))}"
            )
        for name in entries[0] if entries else ():
            shapes = {tuple(entry[name].shape) for entry in entries}
            if len(shapes) > 1:
                raise ValueError(
                    f"{self.name}: {name!r} has shapes {sorted(shapes)} in one batch: pad or crop "
                    "the samples to one size, and let the key say which"
                )
            stacked[name] = torch.stack([entry[name] for entry in entries]).to(where)
        return stacked

    def _look_up(self, digest: str) -> Encoded | None:
        entry = self._memory.pop(digest, None)
        if entry is not None:
            self._memory[digest] = entry  # the most recently used is last
            return entry
        path = self._path(digest)
        if path is None:
            return None
        try:
            entry = entry_file.read(path, digest)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # a disk that was full, a file of somebody else
            self._say_computed_again(f"{path} can't be read ({error})")
            return None
        self._remember(digest, entry)
        return entry

    def _say_computed_again(self, why: str) -> None:
        """Say that of the first only: there may be as many as samples."""
        if not self._said:
            say_once(f"{self.name}: {why}: computed again", level="warning")
        self._said = True

    def _remember(self, digest: str, entry: Encoded) -> None:
        if (old := self._memory.pop(digest, None)) is not None:
            self._used -= _bytes(old)
        size = _bytes(entry)
        if size > self._limit:
            return
        self._memory[digest] = entry
        self._used += size
        while self._used > self._limit:
            oldest = next(iter(self._memory))
            self._used -= _bytes(self._memory.pop(oldest))

    def _write(self, digest: str, entry: Encoded) -> None:
        path = self._path(digest)
        if path is None:
            return
        try:
            entry_file.write(path, digest, entry)
        except OSError as error:
            say_once(f"{self.name}: {path} can't be written: {error}", level="warning")
            self._folder = None  # once is enough

    def _path(self, digest: str) -> Path | None:
        return self._folder and self._folder / digest[:2] / f"{digest[2:]}.pt"

    def _require_unchanged(self) -> None:
        if _versions(self._encoder) != self._versions:
            raise RuntimeError(
                f"{self.name}: the encoder's weights have changed since the cache was made: freeze "
                "it, or make a new EncoderCache after loading weights"
            )

    def _judge(self) -> None:
        """Say once whether keys come back at all: random crops without end never do."""
        number = self.hits + self.misses
        if self._judged or number < _JUDGED:
            return
        self._judged = True
        share = self.hits / number
        few = share < _LEAST_HITS and self._folder is None
        reason = f"{share:.0%} of {number} lookups were there"
        if few:
            reason += ": samples do not come again (is a random crop part of the key?)"
        decisions.record(self.name, "cached", reason)


def sample_posterior(
    mean: torch.Tensor, std: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """A latent drawn from a VAE's posterior, `mean + std * noise`, as the stock scripts draw it.

    With torch's own random numbers it is the very latent that `encode(x).latent_dist.sample()` of
    diffusers gives in this place of the script. Multiply it by the VAE's `scaling_factor`.

    Args:
        mean, std: (batch, channels, height, width), of one dtype and device.
        generator: of that device; default: torch's own.
    """
    noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
    return mean + std * noise


def posterior(distribution: Any) -> Encoded:
    """Return what to keep of a VAE: an object with `mean` and `std` (diffusers' `latent_dist`)."""
    return {"mean": distribution.mean, "std": distribution.std}


def fingerprint(encoder: nn.Module) -> str:
    """The same for encoders of the same class, names and weights, to the last bit."""
    digest = hashlib.sha256(f"{_FORMAT} {type(encoder).__qualname__}".encode())
    for name, value in encoder.state_dict().items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        plain = value.detach().cpu().contiguous().reshape(-1)
        digest.update(memoryview(plain.view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]


def _digest(key: Hashable) -> str:
    _require_plain(key)
    return hashlib.sha256(repr(key).encode()).hexdigest()


def _require_plain(key: Any) -> None:
    if isinstance(key, tuple):
        for part in key:
            _require_plain(part)
    elif not isinstance(key, str | bytes | int | float | bool | None):
        raise TypeError(
            f"a key is made of texts, numbers and tuples, not {type(key).__name__}: it has to be "
            "written the same in the next run"
        )


def _require_frozen(name: str, encoder: nn.Module) -> None:
    if any(parameter.requires_grad for parameter in encoder.parameters()):
        raise ValueError(f"{name}: the encoder trains: call encoder.requires_grad_(False) first")
    if encoder.training:
        raise ValueError(f"{name}: the encoder is in training mode: call encoder.eval() first")


def _versions(encoder: nn.Module) -> list[tuple[int, torch.dtype]]:
    """Changes with every write to a weight and with its dtype; another device is no change."""
    return [(parameter._version, parameter.dtype) for parameter in encoder.parameters()]


def _form(entry: Encoded) -> tuple[tuple[str, str, int], ...]:
    """Return what all samples' outputs share: names, dtypes and numbers of dimensions."""
    return tuple(sorted((name, str(value.dtype), value.dim()) for name, value in entry.items()))


def _bytes(entry: Mapping[str, torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in entry.values())
