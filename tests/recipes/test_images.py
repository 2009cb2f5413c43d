# SPDX-License-Identifier: Apache-2.0
"""Images of every kind as RGB, what is held out of a folder, and DreamBooth's class images."""

import io
import re
import shutil
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from deepytorch.recipes import resnet50_ddp, stable_diffusion_dreambooth
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.base.run import Process
from deepytorch.recipes.data import class_images as _prior
from deepytorch.recipes.data import images as _images

ORIENTATION = 0x0112
UPSIDE_DOWN = 3


def pixels(path):
    return np.asarray(_images.read_image(path)).astype(int)


def test_a_photograph_is_turned_as_its_camera_was(tmp_path):
    seen = np.random.default_rng(3).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = UPSIDE_DOWN
    Image.fromarray(seen[::-1, ::-1]).save(tmp_path / "turned.png", exif=exif)
    assert (pixels(tmp_path / "turned.png") == seen).all()


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    bright = np.random.default_rng(4).integers(0, 1 << 16, (6, 8), dtype=np.uint16)
    bright[0, :2] = 0, (1 << 16) - 1
    Image.fromarray(bright).save(tmp_path / "grey.png")
    found = pixels(tmp_path / "grey.png")
    assert (np.abs(found * 257 - bright[..., None]) < 257).all()
    assert found[0, :2, 0].tolist() == [0, 255]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(tmp_path, mode):
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 2, 4))
    image.convert(mode).save(tmp_path / "part.png")
    found = pixels(tmp_path / "part.png")
    assert (found[:, :2] == 0).all()
    assert (found[:, 2:] == 255).all()


def test_an_image_that_is_too_large_is_named(tmp_path, monkeypatch):
    Image.new("RGB", (50, 50)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(
        RecipeError, match=r"large\.png cannot be read as an image: .* exceeds limit"
    ):
        _images.read_image(tmp_path / "large.png")


def cut_in_two(data):
    return data[: len(data) // 2]


def with_a_length_that_is_none(data):
    place = data.index(b"IDAT") - 1
    return data[:place] + bytes([data[place] - 9]) + data[place + 1 :]


@pytest.mark.parametrize("harm", [cut_in_two, with_a_length_that_is_none])
def test_a_damaged_file_is_named(tmp_path, harm):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (9, 9), np.uint8)).save(file, "PNG")
    (tmp_path / "bad.png").write_bytes(harm(file.getvalue()))
    with pytest.raises(RecipeError, match=r"bad\.png cannot be read as an image: \w"):
        _images.read_image(tmp_path / "bad.png")


@pytest.mark.parametrize("error", [ValueError("no"), SyntaxError("no"), struct.error, EOFError])
def test_whatever_a_decoder_raises_names_the_file(tmp_path, monkeypatch, error):
    def fail(image):
        raise error

    Image.new("RGB", (2, 2)).save(tmp_path / "bad.png")
    monkeypatch.setattr(_images.ImageOps, "exif_transpose", fail)
    with pytest.raises(RecipeError, match=r"bad\.png cannot be read as an image: \w"):
        _images.read_image(tmp_path / "bad.png")


def test_one_value_a_channel_is_no_batch():
    model = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.BatchNorm2d(3), torch.nn.Flatten()
    )
    loss_share = resnet50_ddp.make_loss(model, ours=False)

    def loss(size):
        drawn = [(torch.rand(3, 8, 8), 0)] * size
        return loss_share(_images.collate_images(drawn), torch.tensor(1.0))

    assert loss(2).isfinite()
    with pytest.raises(RecipeError, match="batch_size=1 with image_size=8 leaves batch norm one"):
        loss(1)


@pytest.mark.parametrize("suffix", [".tif", ".TIFF", ".gif"])
def test_scans_and_the_first_of_moving_images_are_read(tmp_path, suffix):
    path = tmp_path / f"one{suffix}"
    first, second = Image.new("RGB", (4, 4), "white"), Image.new("RGB", (4, 4), "black")
    first.save(path, save_all=True, append_images=[second])
    assert _images.image_files(tmp_path) == [path]
    assert (pixels(path) == 255).all()


def test_sixteen_bits_of_a_scan_are_scaled_and_thirty_two_refused(tmp_path):
    Image.fromarray(np.full((4, 4), 257 * 9, dtype=np.uint16)).save(tmp_path / "16.tif")
    assert (pixels(tmp_path / "16.tif") == 9).all()
    for kind in (np.int32, np.float32):
        Image.fromarray(np.ones((4, 4), dtype=kind)).save(tmp_path / "32.tif")
        with pytest.raises(RecipeError, match=r"32\.tif cannot be .*: its pixels are of 32 bits"):
            pixels(tmp_path / "32.tif")


def make_classes(folder, **sizes):
    for name, size in sizes.items():
        (folder / name).mkdir(parents=True)
        for number in range(size):
            Image.new("RGB", (4, 4)).save(folder / name / f"{number:03d}.png")


def test_every_class_can_be_held_out_and_the_rest_is_trained(tmp_path):
    make_classes(tmp_path, cat=81, dog=81, owl=1)

    def split(seed, held_out):
        trained, kept = _images.folder_images(tmp_path, 4, seed, held_out)
        assert sorted([*trained.files, *kept.files]) == sorted(set(trained.files) | set(kept.files))
        assert len(trained.files) + len(kept.files) == 163
        return kept.files

    assert {label for seed in range(20) for _, label in split(seed, 3)} == {0, 1}
    assert all(len(split(seed, 3)) == 3 for seed in range(3))
    assert split(1, 3) == split(1, 3)
    assert len(split(0, 64)) == 10


def test_hidden_names_are_neither_classes_nor_images(tmp_path, capsys):
    make_classes(tmp_path, cat=2, dog=2)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "cat" / "._000.png").write_bytes(b"of macOS")
    (tmp_path / "cat" / ".DS_Store").touch()
    trained, kept = _images.folder_images(tmp_path, 4, 0, 2)
    assert (trained.classes, trained.size + kept.size) == (["cat", "dog"], 4)
    _images.say_others(trained.others)
    assert capsys.readouterr().out == ""


def test_what_is_skipped_is_counted_by_suffix(tmp_path, capsys):
    make_classes(tmp_path, cat=2, dog=2)
    (tmp_path / "cat" / "more").mkdir()
    for name in ("beside.png", "cat/a.TXT", "dog/b.txt", "dog/README", "dog/c.heic"):
        (tmp_path / name).touch()
    _images.say_others(_images.folder_images(tmp_path, 4, 0, 2)[0].others)
    said = capsys.readouterr().out
    assert said == (
        "skipped     6 other files and folders: 2 x .txt, 1 x .heic, 1 x .png beside the classes, "
        "1 x folder, 1 x without a suffix\n"
    )


def test_classes_of_one_image_hold_nothing_out(tmp_path, capsys):
    make_classes(tmp_path / "data", cat=1, dog=1)
    words = ["width=4", "image_size=24", "steps=1", "batch_size=2", "device=cpu", "warmup_steps=1"]
    assert (
        resnet50_ddp.main([*words, f"data={tmp_path / 'data'}", f"output_dir={tmp_path / 'runs'}"])
        == 0
    )
    said = capsys.readouterr().out
    assert "2 images of 2 classes, 0 held out" in said
    assert "accuracy" not in said


@pytest.fixture
def made(monkeypatch):
    """Numbers of the class images that were made, in place of making them."""
    numbers = []

    def generate(parts, config, prompt, seeds):
        numbers.extend(seeds)
        return [Image.new("RGB", (8, 8)) for _ in seeds]

    monkeypatch.setattr(stable_diffusion_dreambooth, "generate", generate)
    return numbers


def class_images(**words):
    config = stable_diffusion_dreambooth.Config(image_size=8, num_class_images=4, **words)
    process = Process(0, 1, torch.device("cpu"))
    return stable_diffusion_dreambooth.class_images(config, SimpleNamespace(), process)


def test_class_images_are_made_once_for_whatever_makes_others(tmp_path, made):
    others = [{}, {"class_prompt": "a dog"}, {"model": "some/one"}, {"architecture": "sdxl"}]
    for words in [*others, {"sample_steps": 3}]:
        for expected in ([0, 1, 2, 3], []):
            made.clear()
            assert len(class_images(output_dir=str(tmp_path), **words)) == 4
            assert made == expected
    assert not list(tmp_path.rglob("*.partial"))


def test_where_class_images_come_from_is_said(tmp_path, made, capsys):
    (tmp_path / "below").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "below" / "one.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    class_images(class_data=str(tmp_path))
    said = capsys.readouterr().out
    assert said == f"class images: making 3 of 4 in {tmp_path} (found 1)\n"
    class_images(class_data=str(tmp_path))
    assert capsys.readouterr().out == ""
    Image.new("RGB", (8, 8)).save(tmp_path / "two.jpg")
    class_images(class_data=str(tmp_path))
    said = capsys.readouterr().out
    assert said == f"class images: using 4 of 5 in {tmp_path}: num_class_images=4\n"


@pytest.mark.parametrize("option", ["class_data", "output_dir"])
@pytest.mark.parametrize("below", [".", "some/where"])
def test_a_file_is_no_folder_for_class_images(tmp_path, made, option, below):
    (tmp_path / "file").touch()
    text = f"{option}: {tmp_path / 'file'} is a file: name a folder, which need not be there yet"
    with pytest.raises(RecipeError, match=f"^{re.escape(text)}$"):
        class_images(**{option: str(tmp_path / "file" / below)})


def test_class_images_that_cannot_be_written_name_the_option(tmp_path, made, monkeypatch):
    def fail(folder, process):
        raise RecipeError("[Errno 13] Permission denied")

    monkeypatch.setattr(_prior, "first_beside", fail)
    text = r"^class_data: the class images can't be written to .*: \[Errno 13\] Permission denied\."
    with pytest.raises(RecipeError, match=text):
        class_images(class_data=str(tmp_path))


def test_only_missing_class_images_are_made(tmp_path, made):
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"IMG_{number}.JPG")
    (tmp_path / "made-0000.png").write_bytes((tmp_path / "IMG_0.JPG").read_bytes())
    assert len(class_images(class_data=str(tmp_path))) == 4
    assert made == []
    (tmp_path / "IMG_1.JPG").unlink()
    (tmp_path / "made-0001.partial").touch()  # of a run that was killed
    assert len(class_images(class_data=str(tmp_path))) == 4
    assert made == [1]


def test_a_resumed_run_knows_its_images_again_by_their_names(tmp_path):
    process = Process(0, 1, torch.device("cpu"))

    def fingerprint(**words):
        config = resnet50_ddp.Config(width=4, image_size=24, batch_size=2, **words)
        return resnet50_ddp.prepare(config, process).batches.fingerprint

    make_classes(tmp_path / "first", cat=4, dog=4)
    shutil.copytree(tmp_path / "first", tmp_path / "moved")
    shutil.copytree(tmp_path / "first", tmp_path / "other")
    (tmp_path / "other" / "dog" / "003.png").rename(tmp_path / "other" / "cat" / "004.png")
    found = [fingerprint(data=str(tmp_path / each)) for each in ("first", "moved", "other")]
    found += [fingerprint(), fingerprint()]
    assert found[0] == found[1]
    assert found[3] == found[4]
    assert len(set(found)) == 3
    assert None not in found


def test_the_subjects_images_have_names():
    config = stable_diffusion_dreambooth.Config(image_size=8)
    images = stable_diffusion_dreambooth.instance_images(config, Process(0, 1, torch.device("cpu")))
    assert len(images) == 12
    assert {tuple(image.shape) for image in images.values()} == {(3, 8, 8)}
