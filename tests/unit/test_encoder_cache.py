"""balance of work: frozen encoders run once, and training can't tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch_core import decisions
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
