"""The reference models are the published ones, and are found by name."""

import pytest
import torch
from torch import nn

from meshwise.errors import ModelError
from meshwise.zoo import TASKS, get_task


def build_on_meta(name, **sizes):
    with torch.device("meta"):
        return get_task(name, **sizes).build()


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt2-medium", 354_823_168),
        ("gpt2-small", 124_439_808),
        ("vgg16", 138_357_544),
        ("resnet50", 25_557_032),
        ("inception_v3", 27_161_264),
    ],
)
def test_parameter_count_is_the_published_one(name, num_parameters):
    assert sum(parameter.numel() for parameter in build_on_meta(name).parameters()) == num_parameters


def test_vgg16_tiny_is_as_deep_as_vgg16():
    def layers(module):
        return [type(part) for part in module.modules() if isinstance(part, (nn.Conv2d, nn.Linear, nn.MaxPool2d))]

    assert layers(build_on_meta("vgg16-tiny")) == layers(build_on_meta("vgg16"))
    assert len([layer for layer in layers(build_on_meta("vgg16-tiny")) if layer is nn.Conv2d]) == 13


def test_vgg16_tiny_is_tiny_and_real():
    module = get_task("vgg16-tiny").build()
    assert sum(parameter.numel() for parameter in module.parameters()) < 300_000
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}


def test_vgg_overwrites_no_tensor_it_was_given():
    for name in ("vgg16", "vgg16-tiny"):
        assert not any(part.inplace for part in build_on_meta(name).modules() if isinstance(part, nn.ReLU))


@pytest.mark.parametrize("name", ["gpt2-tiny", "vgg16-tiny"])
def test_tiny_models_learn_their_example(name):
    task = get_task(name)
    torch.manual_seed(0)
    module = task.build()
    inputs, targets = task.example_inputs(8, torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(module.parameters(), 3e-3)
    losses = []
    for _ in range(12):
        loss = task.loss(module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", TASKS)
def test_outputs_and_loss_fit_the_targets(name):
    task = get_task(name)
    with torch.device("meta"):
        module = task.build()
        inputs, targets = (part.to("meta") for part in task.example_inputs(2))
        loss = task.loss(module(inputs), targets)
        outputs = module.eval()(inputs)
    assert loss.shape == ()
    assert outputs.shape == (*targets.shape, task.num_classes)


def test_same_seed_gives_same_weights():
    def weights():
        torch.manual_seed(3)
        return get_task("vgg16-tiny").build().state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_caller_chooses_the_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        dtypes = {parameter.dtype for parameter in get_task("gpt2-tiny").build().parameters()}
        inputs, _ = get_task("vgg16-tiny").example_inputs(1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtypes == {torch.float64}
    assert inputs.dtype == torch.float64


def test_language_counts_tokens_and_images_count_samples():
    language, image = get_task("gpt2-tiny"), get_task("vgg16-tiny")
    assert (language.metric, language.sample_unit) == ("perplexity", "tokens")
    assert (image.metric, image.sample_unit) == ("accuracy", "samples")


def test_targets_of_language_are_the_next_ids():
    inputs, targets = get_task("gpt2-tiny").example_inputs(3)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_example_inputs_follow_the_generator():
    task = get_task("vgg16-tiny")
    first, second = (task.example_inputs(2, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_sequence_length_may_grow_the_position_table_but_never_shrinks_it():
    short, long = get_task("gpt2-tiny", sequence_length=16), get_task("gpt2-tiny", sequence_length=128)
    with torch.device("meta"):
        assert short.build().transformer.wpe.num_embeddings == 64
        assert long.build().transformer.wpe.num_embeddings == 128
    assert short.example_inputs(1)[0].shape == (1, 16)


def test_num_classes_reaches_the_last_layer():
    assert build_on_meta("resnet50", num_classes=7).fc.out_features == 7
    assert build_on_meta("vgg16-tiny", num_classes=7).classifier[-1].out_features == 7
    assert build_on_meta("gpt2-tiny", num_classes=300).lm_head.out_features == 300


def test_misspelt_model_is_told_the_nearest():
    with pytest.raises(ModelError, match="did you mean 'gpt2-medium'"):
        get_task("gpt2-meduim")


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gpt2-tiny", {"image_size": 32}, "takes text and has no image_size"),
        ("vgg16-tiny", {"sequence_length": 32}, "takes images and has no sequence_length"),
        ("vgg16-tiny", {"image_size": 16}, "use at least 32"),
        ("inception_v3", {"image_size": 224}, "use at least 299"),
        ("resnet50", {"num_classes": 0}, "num_classes=0 is no size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, sizes, message):
    with pytest.raises(ModelError, match=message):
        get_task(name, **sizes)


def test_smallest_image_size_is_one_the_model_can_train_on():
    task = get_task("vgg16-tiny", image_size=33)
    assert task.build()(task.example_inputs(2)[0]).shape == (2, 10)
