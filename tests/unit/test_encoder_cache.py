"""balance of work: frozen encoders run once, and training can't tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch_core.base import decisions
from deepytorch_core.data import EncoderCache, posterior, sample_posterior


class Posterior:
    """As diffusers' DiagonalGaussianDistribution."""

    def __init__(self, moments: torch.Tensor) -> None:
        self.mean, logvar = moments.chunk(2, dim=1)
        self.std = torch.exp(0.5 * logvar.clamp(-30, 20))

    def sample(self) -> torch.Tensor:
        return self.mean + self.std * torch.randn(self.mean.shape, dtype=self.mean.dtype)


class VAE(nn.Module):
    """A small encoder that counts the images it has seen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.seen = 0
        self.requires_grad_(False).eval()

    def encode(self, images: torch.Tensor) -> Posterior:
        self.seen += len(images)
        return Posterior(self.convolution(images))


def images(number: int = 10) -> torch.Tensor:
    return torch.randn(number, 3, 9, 7, generator=torch.Generator().manual_seed(1))


def latents(cache: EncoderCache, vae: VAE, data: torch.Tensor, batch: list[int]) -> torch.Tensor:
    kept = cache.get(
        [(index, "crop", 0, 0) for index in batch],
        lambda places: posterior(vae.encode(data[[batch[place] for place in places]])),
    )
    return sample_posterior(kept["mean"], kept["std"])


def train(draw: Any, num_steps: int = 12) -> list[torch.Tensor]:
    """A training that draws random numbers of its own too; its losses and its weights."""
    torch.manual_seed(5)
    unet = nn.Conv2d(4, 4, 3, padding=1)
    optimizer = torch.optim.SGD(unet.parameters(), lr=0.1)
    found = []
    for step in range(num_steps):
        batch = [(3 * step + offset) % 10 for offset in range(4)]
        latent = 0.18215 * draw(batch)
        noise = torch.randn_like(latent)
        loss = (unet(latent + noise) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *unet.parameters()]


@pytest.mark.parametrize("on_disk", [False, True])
def test_kernels_cached_latents_train_bit_for_bit_as_stock(tmp_path: Path, on_disk: bool) -> None:
    data, stock, ours = images(), VAE(), VAE()
    expected = train(lambda batch: stock.encode(data[batch]).sample())
    cache = EncoderCache("VAE latents", ours, folder=tmp_path if on_disk else None)
    found = train(lambda batch: latents(cache, ours, data, batch))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert (stock.seen, ours.seen) == (48, 10)
    assert (cache.hits, cache.misses) == (38, 10)
    if on_disk:
        second = VAE()
        again = EncoderCache("VAE latents", second, folder=tmp_path, memory_bytes=0)
        found = train(lambda batch: latents(again, second, data, batch))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert second.seen == 0
        other = VAE(seed=1)
        latents(EncoderCache("VAE latents", other, folder=tmp_path), other, data, [0])
        assert other.seen == 1, "other weights have files of their own"


def test_kernels_cache_draws_another_latent_each_time() -> None:
    vae, data = VAE(), images()
    cache = EncoderCache("VAE latents", vae)
    assert not torch.equal(latents(cache, vae, data, [3]), latents(cache, vae, data, [3]))
    assert vae.seen == 1


def test_kernels_cache_keeps_crops_apart_and_computes_twins_once() -> None:
    vae, data = VAE(), images()
    cache = EncoderCache("VAE latents", vae)
    crops = [data[:1, :, :5], data[:1, :, 4:]]
    for _ in range(2):
        for number, crop in enumerate(crops):
            kept = cache.get([(0, number)], lambda places, crop=crop: posterior(vae.encode(crop)))
            assert torch.equal(kept["mean"], vae.convolution(crop)[:, :4])
    assert vae.seen == 2
    twins = cache.get(["a", "b", "a"], lambda places: {"x": data[places]})
    assert torch.equal(twins["x"][0], twins["x"][2])
    assert cache.misses == 4
    twins["x"].zero_()
    assert cache.get(["a"], lambda places: {})["x"].any(), "what is given out is not what is kept"


def test_kernels_cache_of_text_embeddings_without_files_of_their_own(tmp_path: Path) -> None:
    encoder = nn.Embedding(50, 6).requires_grad_(False).eval()
    texts = {"a photo of sks dog": [1, 2, 3], "a photo of a dog": [1, 2, 4]}
    cache = EncoderCache("text embeddings", encoder, folder=tmp_path)
    calls = []

    def encode(prompts: list[str]) -> torch.Tensor:
        def compute(places: list[int]) -> dict[str, torch.Tensor]:
            calls.append(places)
            return {"hidden": encoder(torch.tensor([texts[prompts[place]] for place in places]))}

        return cache.get(prompts, compute)["hidden"]

    first, second = texts
    assert torch.equal(encode([second, first, second])[1], encoder(torch.tensor([1, 2, 3])))
    assert torch.equal(encode([first])[0], encoder(torch.tensor([1, 2, 3])))
    assert len(calls) == 1
    assert len(calls[0]) == 2


def test_kernels_cache_forgets_the_least_recently_used() -> None:
    vae = VAE()
    rows = torch.arange(40.0).reshape(4, 10)
    cache = EncoderCache("rows", vae, memory_bytes=2 * 40)
    for key in (0, 1, 0, 2):
        cache.get([key], lambda places, key=key: {"x": rows[key : key + 1]})
    assert (cache.hits, cache.misses) == (1, 3)
    cache.get([0], lambda places: {})
    cache.get([1], lambda places: {"x": rows[1:2]})
    assert (cache.hits, cache.misses) == (2, 4)


def test_kernels_cache_computes_a_broken_file_again(tmp_path: Path) -> None:
    vae, data = VAE(), images()
    latents(EncoderCache("VAE latents", vae, folder=tmp_path), vae, data, [0])
    (file,) = tmp_path.rglob("*.pt")
    file.write_bytes(b"half")
    again = EncoderCache("VAE latents", vae, folder=tmp_path)
    latents(again, vae, data, [0])
    assert again.misses == 1
    assert file.stat().st_size > 4


def open_to_all(file: Path) -> None:
    file.chmod(0o666)


def in_a_folder_open_to_all(file: Path) -> None:
    file.parent.chmod(0o777)


def given_away(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 12345, 12345)


def holding(content: Callable[[str, dict], object]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        found = torch.load(file, weights_only=True)
        torch.save(content(found["key"], found["entry"]), file)

    return spoil


def with_mean(value: object) -> Callable[[Path], None]:
    return holding(lambda key, entry: {"key": key, "entry": {**entry, "mean": value}})


BAD_FILES = {
    "open to all": (open_to_all, "can be written by others"),
    "in an open folder": (in_a_folder_open_to_all, "can be written by others"),
    "another user's": (given_away, "belongs to another user"),
    "cut off": (lambda file: os.truncate(file, file.stat().st_size // 2), "can't be read"),
    "a bare entry": (holding(lambda key, entry: entry), "no entry of a cache"),
    "a list": (holding(lambda key, entry: [key, entry]), "no entry of a cache"),
    "another sample's": (
        holding(lambda key, entry: {"key": key[::-1], "entry": entry}),
        "the entry of another sample",
    ),
    "empty": (holding(lambda key, entry: {"key": key, "entry": {}}), "holds no tensors"),
    "a number": (with_mean(3.0), "'mean' is no plain tensor"),
    "sparse": (with_mean(torch.ones(4, 5, 4).to_sparse()), "'mean' is no plain tensor"),
    "a parameter": (with_mean(nn.Parameter(torch.ones(4, 5, 4))), "'mean' is no plain tensor"),
}


def said_by(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "VAE" in line]


@pytest.mark.parametrize("kind", BAD_FILES)
def test_kernels_cache_remakes_a_bad_file_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    spoil, reason = BAD_FILES[kind]
    vae, data = VAE(), images()
    latents(EncoderCache("VAE latents", vae, folder=tmp_path), vae, data, [0, 1, 2])
    files = sorted(tmp_path.rglob("*.pt"))
    for file in files[:2]:
        spoil(file)
    capsys.readouterr()
    name = f"VAE {kind}"  # the same line is never said twice in a process
    again = EncoderCache(name, vae, folder=tmp_path)
    kept = again.get(
        [(index, "crop", 0, 0) for index in range(3)],
        lambda places: posterior(vae.encode(data[places])),
    )
    expected = posterior(vae.encode(data[:3]))
    assert all(torch.allclose(kept[each], expected[each]) for each in ("mean", "std"))
    assert again.misses == 2
    (line,) = said_by(capsys)
    assert reason in line
    assert line.endswith("computed again")
    for folder in {file.parent for file in files}:
        folder.chmod(0o755)
    last = EncoderCache(name, vae, folder=tmp_path)
    latents(last, vae, data, [0, 1, 2])
    assert (last.hits, last.misses) == (3, 0), "the files were made anew"


@pytest.mark.parametrize("spoil", [lambda folder: folder.chmod(0o777), given_away])
def test_kernels_cache_leaves_a_folder_of_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None]
) -> None:
    vae, data = VAE(), images()
    latents(EncoderCache("VAE latents", vae, folder=tmp_path), vae, data, [0])
    (folder,) = tmp_path.iterdir()
    spoil(folder)
    cache = EncoderCache("VAE latents", vae, folder=tmp_path)
    latents(cache, vae, data, [0, 1])
    latents(cache, vae, data, [1, 0])
    assert (cache.hits, cache.misses) == (2, 2), "in memory"
    assert len(list(folder.rglob("*.pt"))) == 1
    (line,) = said_by(capsys)
    assert "kept in memory only" in line
    assert str(folder) in line


def test_kernels_cache_believes_what_it_wrote_itself_under_any_umask(tmp_path: Path) -> None:
    vae, data = VAE(), images()
    before = os.umask(0)
    try:
        latents(EncoderCache("VAE latents", vae, folder=tmp_path), vae, data, [0])
    finally:
        os.umask(before)
    again = EncoderCache("VAE latents", vae, folder=tmp_path)
    latents(again, vae, data, [0])
    assert again.hits == 1


@pytest.mark.parametrize("batch", [[0, 1, 2], [1, 0]])
def test_kernels_cache_computes_again_what_another_script_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batch: list[int]
) -> None:
    """Sample 0's file has other names, sample 1's another dtype; 2 has none."""
    vae, data = VAE(), images()
    older = EncoderCache("rows", vae, folder=tmp_path)
    older.get([0], lambda places: {"latent": data[:1]})
    older.get([1], lambda places: {"x": data[1:2].half()})
    capsys.readouterr()
    cache = EncoderCache(f"VAE rows {len(batch)}", vae, folder=tmp_path)
    kept = cache.get(batch, lambda places: {"x": data[[batch[place] for place in places]]})
    assert torch.equal(kept["x"], data[batch])
    assert kept["x"].dtype == torch.float32
    assert (cache.hits, cache.misses) == (0, len(batch))
    assert len(said_by(capsys)) == 1
    again = EncoderCache("VAE rows", vae, folder=tmp_path)
    assert torch.equal(again.get(batch, lambda places: {})["x"], data[batch])
    # One computed in this process that does not fit the rest is the script's own mistake.
    with pytest.raises(ValueError, match=r"different names, dtypes or dimensions in one batch"):
        again.get([0, 7], lambda places: {"y" if places == [1] else "x": data[:1]})


def test_kernels_cache_that_never_hits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch_core.data.cache._JUDGED", 6)
    monkeypatch.setattr(decisions, "_made", [])
    vae, data = VAE(), images()
    cache = EncoderCache("VAE latents", vae)
    for step in range(3):
        cache.get([(step, 0), (step, 1)], lambda places: {"x": data[places]})
    (decision,) = decisions.made()
    assert "0% of 6 lookups were there: samples do not come again" in decision["reason"]


def test_kernels_cache_refuses_what_would_be_wrong(tmp_path: Path) -> None:
    vae, data = VAE(), images()
    with pytest.raises(ValueError, match=r"requires_grad_\(False\)"):
        EncoderCache("x", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"encoder.eval\(\)"):
        EncoderCache("x", VAE().train())
    cache = EncoderCache("x", vae)
    with pytest.raises(TypeError, match="texts, numbers and tuples, not object"):
        cache.get([(1, object())], lambda places: {})
    with pytest.raises(ValueError, match="1 rows of 'x' for 2 positions"):
        cache.get([0, 1], lambda places: {"x": data[:1]})
    cache.get([5], lambda places: {"x": data[:1, :, :3]})
    cache.get([6], lambda places: {"x": data[:1]})
    with pytest.raises(ValueError, match="pad or crop"):
        cache.get([5, 6], lambda places: {})
    with torch.no_grad():
        vae.convolution.weight.add_(1)
    with pytest.raises(RuntimeError, match="weights have changed"):
        cache.get([5], lambda places: {})
