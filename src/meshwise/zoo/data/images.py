"""Image data: scikit-learn's digits, Fashion-MNIST's IDX files, folders of images."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwise.errors import DataError
from meshwise.zoo.data.order import Indices
from meshwise.zoo.data.samples import Fit, GreyImages, LazyImages, Octets, Pool
from meshwise.zoo.task import Task

FASHION_MNIST_FOLDER = "/usr/share/datasets/fashion-mnist"
"""Where Debian's package ``dataset-fashion-mnist`` puts the files."""

# Mean and standard deviation of ImageNet's training pixels in 0…1, as torchvision's reference training uses them.
_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CROP_FRACTION = 224 / 256  # torchvision's evaluation crop
_NUM_FOR_STATISTICS = 4096


def read_digits(_: str, task: Task) -> Pool:
    """1797 handwritten digits of 8×8, each pixel repeated up to the model's image size.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("data 'digits' come with scikit-learn, which is missing; pip install scikit-learn") from error
    found = load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)  # shades 0…16
    samples = _grey(pixels, found.target.astype(np.int64), fit=_repeat, task=task)
    return Pool(samples=samples, validation=None, num_classes=10)


def read_fashion_mnist(argument: str, task: Task) -> Pool:
    """60 000 training and 10 000 validation pictures of 28×28, padded to twice their size, resized beyond.

    Raises:
        DataError: a file is missing, or not the IDX file it should be.
    """
    folder = Path(argument or FASHION_MNIST_FOLDER).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"data 'fashion-mnist': {folder} is no folder; apt install dataset-fashion-mnist, "
            "or name the folder with its four IDX files as fashion-mnist:FOLDER"
        )
    train = _idx_pair(folder, "train")
    pixels, labels = _idx_pair(folder, "t10k")
    samples = _grey(*train, fit=_pad_or_resize, task=task)
    validation = GreyImages(
        pixels=pixels,
        labels=labels,
        mean=samples.mean,
        deviation=samples.deviation,
        fit=_pad_or_resize,
        image_size=samples.image_size,
    )
    return Pool(samples=samples, validation=validation, num_classes=int(max(train[1].max(), labels.max())) + 1)


def read_image_folder(argument: str, task: Task) -> Pool:
    """Images in one folder per class, below ``train/`` and ``val/`` where these are there.

    Raises:
        DataError: no such folder, no images, or other classes in ``val`` than in ``train``.
    """
    root = Path(argument).expanduser()
    name = f"imagefolder:{argument}"
    if not root.is_dir():
        raise DataError(f"data {name!r}: {root} is no folder; name one with a folder of images per class")
    has_split = (root / "train").is_dir() and (root / "val").is_dir()
    samples, classes = _image_files(root / "train" if has_split else root, name=name, task=task)
    if not has_split:
        return Pool(samples=samples, validation=None, num_classes=len(classes))
    validation, validation_classes = _image_files(root / "val", name=name, task=task)
    if classes != validation_classes:
        odd = sorted(set(classes) ^ set(validation_classes))
        raise DataError(f"data {name!r}: class {odd[0]!r} is not in both train and val; give both the same folders")
    return Pool(samples=samples, validation=validation, num_classes=len(classes))


def to_pixels(image: Any, image_size: int) -> Tensor:
    """A PIL image as [3, S, S], its middle crop, normalised as ImageNet is; in the default dtype."""
    from torchvision.transforms import functional

    margin = _CROP_FRACTION if min(image.size) > image_size else 1.0
    resized = functional.resize(image.convert("RGB"), [round(image_size / margin)])
    cropped = functional.center_crop(resized, [image_size, image_size])
    pixels = functional.pil_to_tensor(cropped).to(torch.get_default_dtype()) / 255
    return functional.normalize(pixels, list(_IMAGENET_MEAN), list(_IMAGENET_DEVIATION))


def _image_files(folder: Path, *, name: str, task: Task) -> tuple[LazyImages, list[str]]:
    from torchvision.datasets import ImageFolder

    try:
        found = ImageFolder(str(folder))
    except (FileNotFoundError, OSError) as error:
        raise DataError(
            f"data {name!r}: {folder} does not hold one folder of images per class ({error}); "
            "lay it out as CLASS/IMAGE.jpg, or train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg"
        ) from error
    return LazyImages(num_samples=len(found.samples), read=_file_reader(found.samples, task)), list(found.classes)


def _file_reader(files: list[tuple[str, int]], task: Task) -> Callable[[int], tuple[Tensor, int]]:
    from PIL import Image

    def read(index: int) -> tuple[Tensor, int]:
        path, label = files[index]
        try:
            with Image.open(path) as image:
                return to_pixels(image, task.image_size or 0), label
        except (OSError, ValueError, SyntaxError) as error:  # PIL raises SyntaxError for a broken PNG
            raise DataError(f"{path} cannot be decoded ({error}); replace or remove the image") from error

    return read


def _grey(pixels: Octets, labels: Indices, *, fit: Fit, task: Task) -> GreyImages:
    first = pixels[:_NUM_FOR_STATISTICS] / 255.0  # in file order: the normalisation must not depend on the seed
    return GreyImages(
        pixels=pixels,
        labels=labels,
        mean=float(first.mean()),
        deviation=float(first.std()) or 1.0,
        fit=fit,
        image_size=task.image_size or 0,
    )


def _repeat(pixels: Tensor, size: int) -> Tensor:
    return nn.functional.interpolate(pixels, size=(size, size), mode="nearest")


def _pad_or_resize(pixels: Tensor, size: int) -> Tensor:
    own = pixels.shape[-1]
    if own <= size < 2 * own:
        before = (size - own) // 2
        after = size - own - before
        return nn.functional.pad(pixels, (before, after, before, after))
    return nn.functional.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True)


def _idx_pair(folder: Path, part: str) -> tuple[Octets, Indices]:
    pixels = _read_idx(folder / f"{part}-images-idx3-ubyte", num_dims=3)
    labels = _read_idx(folder / f"{part}-labels-idx1-ubyte", num_dims=1)
    if len(pixels) != len(labels) or not len(pixels) or pixels.shape[1] != pixels.shape[2]:
        raise DataError(
            f"{folder}: {part} has images {list(pixels.shape)} and {len(labels)} labels; "
            "give as many labels as square images, and at least one"
        )
    return pixels, labels.astype(np.int64)


def _read_idx(path: Path, *, num_dims: int) -> Octets:
    """An IDX file of bytes: 0, 0, 8 (unsigned byte), dims, then each dim as a big-endian int32, then the values."""
    zipped = path.with_name(path.name + ".gz")
    found = next((candidate for candidate in (path, zipped) if candidate.is_file()), None)
    if found is None:
        raise DataError(f"{path.parent} has no {path.name} or {zipped.name}; put Fashion-MNIST's four IDX files there")
    try:
        content = gzip.decompress(found.read_bytes()) if found == zipped else found.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{found} cannot be read ({error}); get the file again") from error
    header_size = 4 + 4 * num_dims
    if len(content) < header_size or content[:4] != bytes([0, 0, 8, num_dims]):
        raise DataError(f"{found} does not begin as an IDX file of bytes in {num_dims} dims does; get the file again")
    shape = np.frombuffer(content, dtype=">i4", count=num_dims, offset=4).astype(int)
    num_values, promised = len(content) - header_size, int(np.prod(shape))
    if num_values != promised:
        raise DataError(f"{found} holds {num_values} values, its header says {promised}; get the file again")
    return np.frombuffer(content, dtype=np.uint8, offset=header_size).reshape(shape)
