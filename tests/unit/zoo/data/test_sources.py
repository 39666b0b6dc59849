"""Data are found by name, fit the model, and are split by seed alone."""

import numpy as np
import pytest
import torch

from meshwise.errors import DataError
from meshwise.zoo import get_task
from meshwise.zoo.data import SOURCES, load

LANGUAGE, IMAGE = get_task("gpt2-tiny", sequence_length=9), get_task("vgg16-tiny")


@pytest.fixture
def numbered(tmp_path):
    """100 samples, told apart by their first byte."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(bytes([number]) * 10 for number in range(100)))
    return f"text:{path}"


def first_bytes(samples):
    return samples.batch(np.arange(len(samples)))[0][:, 0].tolist()


def test_split_leaves_nothing_out_and_nothing_in_both(numbered):
    data = load(numbered, task=LANGUAGE, seed=0)
    train, validation = first_bytes(data.train), first_bytes(data.validation)
    assert len(validation) == 10
    assert sorted(train + validation) == list(range(100))


def test_split_is_the_seeds(numbered):
    def validation(seed):
        return first_bytes(load(numbered, task=LANGUAGE, seed=seed).validation)

    assert validation(0) == validation(0)
    assert validation(0) != validation(1)


def test_limits_cut_but_do_not_change_the_split(numbered):
    whole = load(numbered, task=LANGUAGE, seed=0)
    data = load(numbered, task=LANGUAGE, seed=0, train_samples=20, validation_samples=3)
    assert first_bytes(data.train) == first_bytes(whole.train)[:20]
    assert first_bytes(data.validation) == first_bytes(whole.validation)[:3]
    assert len(load(numbered, task=LANGUAGE, seed=0, train_samples=10**6).train) == 90


def test_validation_indices_are_renumbered(numbered):
    validation = load(numbered, task=LANGUAGE, seed=0).validation
    assert first_bytes(validation)[4] == validation.batch(np.array([4]))[0][0, 0]


@pytest.mark.parametrize("name", ["train_samples", "validation_samples"])
def test_no_samples_are_refused(numbered, name):
    with pytest.raises(DataError, match=f"{name}=0 leaves nothing"):
        load(numbered, task=LANGUAGE, seed=0, **{name: 0})


def test_misspelt_data_are_told_the_nearest():
    with pytest.raises(DataError, match="did you mean 'fashion-mnist'"):
        load("fashon-mnist", task=IMAGE, seed=0)


def test_text_does_not_fit_an_image_model():
    with pytest.raises(DataError) as caught:
        load("stdlib", task=IMAGE, seed=0)
    assert str(caught.value) == (
        "data 'stdlib' are text and vgg16-tiny takes images; "
        "use digits, fashion-mnist[:FOLDER], imagefolder:PATH or datasets:NAME"
    )


def test_images_do_not_fit_a_language_model():
    with pytest.raises(DataError, match="digits' are images and gpt2-tiny takes text; use stdlib, text:PATH or datas"):
        load("digits", task=LANGUAGE, seed=0)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.argument in ("PATH", "NAME")])
@pytest.mark.parametrize("colon", ["", ":"])
def test_source_that_needs_to_know_which(name, colon):
    task = IMAGE if SOURCES[name].kind == "image" else LANGUAGE
    with pytest.raises(DataError, match=f"does not say which; write {name}:"):
        load(name + colon, task=task, seed=0)


def test_source_that_takes_nothing():
    with pytest.raises(DataError, match="takes nothing after the colon; write digits"):
        load("digits:8", task=IMAGE, seed=0)


def test_vocabulary_smaller_than_bytes():
    with pytest.raises(DataError, match="have 256 byte values and gpt2-tiny tells 100 apart; use num_classes=256"):
        load("stdlib", task=get_task("gpt2-tiny", num_classes=100), seed=0)


def test_bytes_fit_a_larger_vocabulary(numbered):
    inputs, _ = load(numbered, task=get_task("gpt2-small", sequence_length=9), seed=0).train.batch(np.array([0]))
    assert inputs.shape == (1, 9)


def test_single_sample_cannot_be_split(tmp_path):
    from PIL import Image

    (tmp_path / "cat").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "cat" / "0.png")
    with pytest.raises(DataError, match=r"hold 1 sample\(s\), too few"):
        load(f"imagefolder:{tmp_path}", task=IMAGE, seed=0)


@pytest.mark.parametrize("name", ["gpt2-tiny", "vgg16-tiny"])
def test_default_data_fit_the_default_model(name):
    task = get_task(name)
    data = load(task.default_data, task=task, seed=0)
    inputs, targets = data.train.batch(np.arange(2))
    expected_inputs, expected_targets = task.example_inputs(2)
    assert (inputs.shape, inputs.dtype) == (expected_inputs.shape, expected_inputs.dtype)
    assert (targets.shape, targets.dtype) == (expected_targets.shape, expected_targets.dtype)
    assert data.sample_unit == task.sample_unit
    assert torch.isfinite(task.loss(task.build()(inputs), targets))
