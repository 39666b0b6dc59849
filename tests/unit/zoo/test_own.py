"""The user's own file becomes a task, or one clear error."""

import textwrap

import pytest
import torch

from meshwise.errors import ModelError
from meshwise.zoo import get_task
from meshwise.zoo.gpt2 import CausalLanguageModel

CNN = """
    from torch import nn

    def net():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_module_alone_is_enough(write):
    name = f"{write(CNN)}:net"
    task = get_task(name)
    assert (task.name, task.kind, task.num_classes, task.image_size) == (name, "image", 6, 32)
    inputs, targets = task.example_inputs(2)
    assert task.loss(task.build()(inputs), targets).isfinite()


def test_build_is_real_though_the_probe_is_not(write):
    task = get_task(f"{write(CNN)}:net")
    assert {parameter.device.type for parameter in task.build().parameters()} == {"cpu"}


def test_looking_uses_up_no_random_numbers(write):
    path = write(CNN)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    get_task(f"{path}:net")
    assert torch.equal(torch.rand(3), expected)


def test_declared_facts_win(write):
    path = write(
        CNN
        + """
    net.task = {"image_size": 24, "num_classes": 5, "default_global_batch_size": 12,
                "optimizer": {"name": "sgd", "learning_rate": 0.5}}
    """
    )
    task = get_task(f"{path}:net")
    assert (task.image_size, task.num_classes, task.default_global_batch_size) == (24, 5, 12)
    assert (task.optimizer.name, task.optimizer.learning_rate) == ("sgd", 0.5)
    assert get_task(f"{path}:net", image_size=28).image_size == 28


def test_embedding_means_language(write):
    path = write("""
        from torch import nn

        def net():
            return nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300))
    """)
    task = get_task(f"{path}:net", sequence_length=10)
    assert (task.kind, task.num_classes, task.default_data) == ("language", 300, "stdlib")
    inputs, targets = task.example_inputs(2)
    assert inputs.shape == (2, 10)
    assert task.loss(task.build()(inputs), targets).isfinite()


def test_asked_sizes_reach_the_functions_parameters(write):
    path = write("""
        from torch import nn

        def net(num_classes=10):
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))
    """)
    assert get_task(f"{path}:net").num_classes == 10
    assert get_task(f"{path}:net", num_classes=4).build()[-1].out_features == 4


def test_pair_brings_its_own_loss(write):
    path = write("""
        import torch
        from torch import nn

        def net():
            return nn.Conv2d(3, 4, 3), lambda outputs, targets: outputs.square().mean()
        net.task = {"num_classes": 4}
    """)
    task = get_task(f"{path}:net")
    assert task.loss(torch.full((2,), 3.0), torch.zeros(2)) == 9


def test_loss_with_class_weights_is_real(write):
    path = write("""
        import torch
        from torch import nn

        def net():
            return nn.Conv2d(3, 2, 3), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
        net.task = {"num_classes": 2}
    """)
    loss = get_task(f"{path}:net").loss(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))
    expected = torch.nn.functional.cross_entropy(
        torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), weight=torch.tensor([1.0, 3.0])
    )
    assert loss == expected


def test_task_is_taken_as_it_is(write):
    path = write("""
        from torch import nn
        from meshwise.zoo import Task

        def net():
            return Task(name="x", kind="image", build=lambda: nn.Linear(2, 2), loss=nn.functional.cross_entropy,
                        num_classes=2, image_size=9, default_data="digits", default_global_batch_size=4)
    """)
    task = get_task(f"{path}:net", image_size=11)
    assert (task.name, task.image_size, task.default_global_batch_size) == (f"{path}:net", 11, 4)


def test_hugging_face_gpt2_becomes_a_chain(write):
    path = write("""
        from transformers import GPT2Config, GPT2LMHeadModel

        def net():
            return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=64, vocab_size=256,
                                              bos_token_id=None, eos_token_id=None))
    """)
    assert isinstance(get_task(f"{path}:net").build(), CausalLanguageModel)


def test_file_may_read_values_while_it_builds(write):
    path = write("""
        import torch
        from torch import nn

        def net():
            layer = nn.Conv2d(3, 4, 3)
            layer.weight.data /= layer.weight.abs().max().item()
            return layer
        net.task = {"num_classes": 4}
    """)
    assert get_task(f"{path}:net").build().weight.abs().max() == 1


def test_file_may_import_its_neighbour(write):
    write("WIDTH = 5", name="neighbour_of_mine.py")
    path = write("""
        from torch import nn
        from neighbour_of_mine import WIDTH

        def net():
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, WIDTH))
    """)
    assert get_task(f"{path}:net").num_classes == 5


def test_two_files_of_one_name_are_two(write, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = write(CNN), write(CNN.replace("4, 6)", "4, 7)"), name="other/mine.py")
    assert [get_task(f"{path}:net").num_classes for path in (first, second)] == [6, 7]


def refusal(name, **sizes):
    with pytest.raises(ModelError) as caught:
        get_task(str(name), **sizes)
    return str(caught.value)


def test_missing_file():
    assert "nowhere.py is not a file" in refusal("nowhere.py:net")


def test_missing_function(write):
    assert "no function 'ned'; did you mean 'net'" in refusal(f"{write(CNN)}:ned")


def test_file_without_functions(write):
    assert "no function 'net'; define it there" in refusal(f"{write('x = 1')}:net")


@pytest.mark.parametrize("colon", ["", ":"])
def test_function_left_out(write, colon):
    assert "names no function" in refusal(f"{write(CNN)}{colon}")
    assert "functions there: net" in refusal(f"{write(CNN)}{colon}")


def test_no_module_returned(write):
    assert "returned int, not a module" in refusal(f"{write('def net(): return 3')}:net")
    path = write("from torch import nn\ndef net(): return nn.Linear(2, 2), 3")
    assert "returned (Linear, int), not a module" in refusal(f"{path}:net")


def test_exception_names_file_line_and_error(write):
    path = write("def net():\n    x = {}\n    return x['width']\n")
    assert f"{path}:3 raised KeyError: 'width'" in refusal(f"{path}:net")


def test_exception_deep_in_a_library_names_the_users_line(write):
    path = write("from torch import nn\n\ndef net():\n    return nn.Linear('a', 3)\n")
    assert f"{path}:4 raised TypeError" in refusal(f"{path}:net")


@pytest.mark.parametrize(
    ("text", "place", "error"),
    [
        ("import torch\n\nimport no_such_module\n", 3, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1\ndef net(:\n", 2, "SyntaxError"),
        ("import sys\nsys.exit('bye')\n", 2, "SystemExit: bye"),
    ],
)
def test_file_that_does_not_import(write, text, place, error):
    path = write(text)
    assert f"{path}:{place} raised {error}" in refusal(f"{path}:net")


def test_ambiguous_kind_asks(write):
    path = write("from torch import nn\ndef net(): return nn.Linear(3, 4)")
    assert 'net.task = {"kind": "image"}' in refusal(f"{path}:net")


def test_unknown_number_of_classes_asks(write):
    path = write("from torch import nn\ndef net(): return nn.Conv2d(3, 4, 3)")
    assert 'net.task = {"num_classes": …}' in refusal(f"{path}:net")


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ('{"image_sise": 3}', "did you mean 'image_size'"),
        ('{"optimizer": {"lerning_rate": 3}}', "did you mean 'learning_rate'"),
        ('{"kind": "sound"}', "use 'language' or 'image'"),
        ('{"image_size": "big"}', "image_size='big'"),
    ],
)
def test_misspelt_declaration(write, declaration, message):
    assert message in refusal(f"{write(CNN + f'    net.task = {declaration}')}:net")


def test_num_classes_without_parameter(write):
    assert "has no parameter num_classes" in refusal(f"{write(CNN)}:net", num_classes=3)
