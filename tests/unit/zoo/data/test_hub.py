"""Hugging Face data sets, read from local folders: no test reaches the network."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from PIL import Image

from meshwise.errors import DataError
from meshwise.zoo import get_task
from meshwise.zoo.data import load

LANGUAGE, IMAGE = get_task("gpt2-tiny", sequence_length=7), get_task("vgg16-tiny")
needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("datasets"):
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        load("datasets:wikitext", task=LANGUAGE, seed=0)


@needs_datasets
def test_text_column_becomes_windows(tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"id": 1, "text": "abcdefg"}, {"id": 2, "text": "hijklmno"}])
    write_rows(tmp_path / "test.jsonl", [{"id": 3, "text": "ABCDEFGHIJKLMNOPQR"}])
    data = load(f"datasets:{tmp_path}", task=LANGUAGE, seed=0)
    assert (len(data.train), len(data.validation)) == (2, 2)
    rows = {bytes(row.tolist()) for row in data.train.batch(np.arange(2))[0]}
    assert rows == {b"abcdefg", b"hijklmn"}


@needs_datasets
def test_images_with_classes(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(5):
            Image.new("L", (28, 28), index).save(tmp_path / name / f"{index}.png")
    data = load(f"datasets:{tmp_path}", task=IMAGE, seed=0)
    pixels, labels = data.train.batch(np.arange(9))
    assert pixels.shape == (9, 3, 32, 32)
    assert set(labels.tolist()) == {0, 1}
    assert len(data.validation) == 1


@needs_datasets
def test_no_column_that_fits(tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"x": 1, "y": 2}])
    with pytest.raises(DataError, match="have columns x, y and no text column"):
        load(f"datasets:{tmp_path}", task=LANGUAGE, seed=0)
    with pytest.raises(DataError, match="have columns x, y and no image column"):
        load(f"datasets:{tmp_path}", task=IMAGE, seed=0)


@needs_datasets
def test_unknown_name(tmp_path):
    with pytest.raises(DataError, match="cannot be loaded"):
        load(f"datasets:{tmp_path}/none", task=LANGUAGE, seed=0)
