"""Images come out [B, 3, S, S], normalised, whatever they were."""

import gzip
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from meshwise.errors import DataError
from meshwise.zoo import get_task
from meshwise.zoo.data import images, load

TASK = get_task("vgg16-tiny")


def write_idx(path, values, *, zipped=False):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape)
    content = header + values.astype(np.uint8).tobytes()
    if zipped:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


@pytest.fixture(params=[False, True], ids=["raw", "gz"])
def fashion(tmp_path, request):
    random = np.random.default_rng(0)
    for part, count in (("train", 30), ("t10k", 12)):
        pixels = random.integers(1, 256, (count, 28, 28))
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", pixels, zipped=request.param)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(count) % 10, zipped=request.param)
    return tmp_path


def write_image_folder(root, classes=("cat", "dog"), count=3, size=(48, 40)):
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", size, (100 * number, 10 * index, 0)).save(root / name / f"{index}.png")


def test_digits_are_scikit_learns_repeated():
    samples = images.read_digits("", TASK).samples
    pixels, labels = samples.batch(np.arange(6))
    assert pixels.shape == (6, 3, 32, 32)
    assert labels.tolist() == load_digits().target[:6].tolist()
    shades = (pixels[0, 0, ::4, ::4] * samples.deviation + samples.mean) * 16
    assert torch.allclose(shades.round(), torch.tensor(load_digits().images[0], dtype=torch.float32))
    assert torch.equal(pixels[:, 0], pixels[:, 2])
    assert torch.equal(pixels[..., 0, 0], pixels[..., 3, 3])


def test_pixels_are_normalised_and_of_the_default_dtype():
    samples = images.read_digits("", TASK).samples
    torch.set_default_dtype(torch.float64)
    try:
        pixels, _ = samples.batch(np.arange(len(samples)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert pixels.dtype == torch.float64
    assert abs(pixels.mean()) < 1e-6
    assert abs(pixels.std() - 1) < 1e-4


def test_fashion_mnist_keeps_its_own_split(fashion):
    data = load(f"fashion-mnist:{fashion}", task=TASK, seed=0)
    assert (len(data.train), len(data.validation)) == (30, 12)
    assert (data.name, data.sample_unit) == (f"fashion-mnist:{fashion}", "samples")


@pytest.mark.parametrize("size", [20, 28, 32, 56, 224])
def test_fashion_mnist_is_fitted_to_any_size(fashion, size):
    task = get_task("resnet50", image_size=max(size, 32))
    pool = images.read_fashion_mnist(str(fashion), task)
    pixels = images._pad_or_resize(torch.rand(2, 1, 28, 28), size)
    assert pixels.shape == (2, 1, size, size)
    assert pool.samples.batch(np.array([3]))[0].shape == (1, 3, task.image_size, task.image_size)


def test_padding_puts_the_picture_in_the_middle(fashion):
    samples = images.read_fashion_mnist(str(fashion), TASK).samples
    pixels = samples.batch(np.array([0]))[0] * samples.deviation + samples.mean
    assert pixels[0, 0, 2:-2, 2:-2].min() > 0.5 / 255
    assert pixels[0, 0, :2].abs().max() < 1e-6


def test_fashion_mnist_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "FASHION_MNIST_FOLDER", str(tmp_path / "none"))
    with pytest.raises(DataError, match="apt install dataset-fashion-mnist"):
        load("fashion-mnist", task=TASK, seed=0)


def test_fashion_mnist_with_a_file_missing(fashion):
    for file in fashion.glob("t10k-labels*"):
        file.unlink()
    with pytest.raises(DataError, match="has no t10k-labels-idx1-ubyte or"):
        load(f"fashion-mnist:{fashion}", task=TASK, seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin as an IDX file"),
        (b"<html>404 not found</html>", "does not begin as an IDX file"),
        (bytes([0, 0, 8, 1]) + struct.pack(">i", 30) + b"x" * 29, "holds 29 values, its header says 30"),
        (bytes([0, 0, 8, 1]) + struct.pack(">i", 2) + b"xx", "and 2 labels"),
    ],
)
def test_broken_idx_file(fashion, content, message):
    for file in fashion.glob("train-labels*"):
        file.unlink()
    (fashion / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(f"fashion-mnist:{fashion}", task=TASK, seed=0)


def test_broken_gzip(fashion):
    for file in fashion.glob("train-labels*"):
        file.unlink()
    (fashion / "train-labels-idx1-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match="cannot be read"):
        load(f"fashion-mnist:{fashion}", task=TASK, seed=0)


def test_image_folder_with_train_and_val(tmp_path):
    write_image_folder(tmp_path / "train", count=4)
    write_image_folder(tmp_path / "val", count=2)
    data = load(f"imagefolder:{tmp_path}", task=TASK, seed=0)
    assert (len(data.train), len(data.validation)) == (8, 4)
    pixels, labels = data.train.batch(np.arange(8))
    assert pixels.shape == (8, 3, 32, 32)
    assert sorted(labels.tolist()) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_image_folder_without_val_is_split(tmp_path):
    write_image_folder(tmp_path, count=10)
    data = load(f"imagefolder:{tmp_path}", task=TASK, seed=0)
    assert (len(data.train), len(data.validation)) == (18, 2)


def test_image_pixels_are_normalised_as_imagenet(tmp_path):
    write_image_folder(tmp_path, count=2)
    pixels, _ = images.read_image_folder(str(tmp_path), TASK).samples.batch(np.array([3]))
    colour = pixels[0, :, 5, 5] * torch.tensor([0.229, 0.224, 0.225]) + torch.tensor([0.485, 0.456, 0.406])
    torch.testing.assert_close(colour * 255, torch.tensor([100.0, 10.0, 0.0]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("size", "mode"), [((20, 90), "RGB"), ((32, 32), "L"), ((300, 200), "RGBA"), ((33, 31), "P")])
def test_any_image_becomes_square_and_coloured(size, mode):
    assert images.to_pixels(Image.new(mode, size), 32).shape == (3, 32, 32)


def test_image_folder_errors(tmp_path):
    with pytest.raises(DataError, match="is no folder"):
        load(f"imagefolder:{tmp_path}/none", task=TASK, seed=0)
    with pytest.raises(DataError, match="one folder of images per class"):
        load(f"imagefolder:{tmp_path}", task=TASK, seed=0)
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="one folder of images per class"):
        load(f"imagefolder:{tmp_path}", task=TASK, seed=0)


def test_image_folder_with_other_classes_in_val(tmp_path):
    write_image_folder(tmp_path / "train")
    write_image_folder(tmp_path / "val", classes=("cat", "emu"))
    with pytest.raises(DataError, match="'dog' is not in both train and val"):
        load(f"imagefolder:{tmp_path}", task=TASK, seed=0)


def test_broken_image_is_named(tmp_path):
    write_image_folder(tmp_path)
    (tmp_path / "cat" / "0.png").write_bytes(b"nothing like an image")
    with pytest.raises(DataError, match=r"cat/0\.png cannot be decoded"):
        images.read_image_folder(str(tmp_path), TASK).samples.batch(np.array([0]))


def test_more_classes_than_the_model_has(tmp_path):
    write_image_folder(tmp_path, classes=[f"c{i:02}" for i in range(11)], count=1)
    with pytest.raises(DataError, match="have 11 classes and vgg16-tiny tells 10 apart; use num_classes=11"):
        load(f"imagefolder:{tmp_path}", task=TASK, seed=0)
