from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwise.run.weight_versions import WeightVersions


def build() -> tuple[nn.Linear, WeightVersions]:
    module = nn.Linear(3, 2)
    return module, WeightVersions(module, torch.optim.SGD(module.parameters(), lr=1.0))


def ones(versions: WeightVersions) -> list[Tensor | None]:
    return [torch.ones_like(parameter) for parameter in versions.parameters]


def test_a_version_no_one_needs_is_updated_in_place() -> None:
    module, versions = build()
    storage = module.weight.data_ptr()
    versions.update(ones(versions), oldest_needed=1)
    assert module.weight.data_ptr() == storage
    assert versions.peak_versions == 1
    assert versions.newest == 1


def test_a_version_still_needed_keeps_its_values() -> None:
    module, versions = build()
    before = module.weight.detach().clone()
    versions.update(ones(versions), oldest_needed=0)
    assert torch.equal(versions.leaves(0)["weight"], before)
    assert torch.equal(versions.leaves(1)["weight"], before - 1)
    assert torch.equal(module.weight, before - 1)
    assert versions.peak_versions == 2


def test_backward_of_an_old_version_uses_the_old_weights_after_an_update() -> None:
    module, versions = build()
    old = versions.leaves(0)
    x = torch.ones(1, 3, requires_grad=True)
    output = torch.func.functional_call(module, old, (x,))
    expected = old["weight"].detach().sum(0, keepdim=True)
    versions.update(ones(versions), oldest_needed=0)
    (gradient,) = torch.autograd.grad(output.sum(), [x])
    assert torch.equal(gradient, expected)


def test_a_copy_goes_into_the_storage_of_a_retired_version() -> None:
    _, versions = build()
    oldest = versions.leaves(0)["weight"].data_ptr()
    versions.update(ones(versions), oldest_needed=0)
    versions.update(ones(versions), oldest_needed=1)
    assert versions.leaves(2)["weight"].data_ptr() == oldest
    assert versions.peak_versions == 2


def test_a_version_that_a_graph_still_holds_is_counted() -> None:
    """What is measured is what is alive, not what should be."""
    _, versions = build()
    leaked = []
    for newest in range(3):
        leaked.append(versions.leaves(newest))
        versions.update(ones(versions), oldest_needed=newest)
        versions.forget(before=newest + 1)
    assert versions.peak_versions == 4
    assert versions.peak_nbytes == 4 * (3 * 2 + 2) * 4


def test_frozen_parameters_have_no_versions_and_count_once() -> None:
    module = nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    versions = WeightVersions(module, torch.optim.SGD([module.weight], lr=1.0))
    versions.update(ones(versions), oldest_needed=0)
    assert set(versions.leaves(1)) == {"weight"}
    assert versions.peak_nbytes == 2 * 24 + 8


def test_a_stage_without_parameters_has_one_version() -> None:
    versions = WeightVersions(nn.ReLU(), torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=1.0))
    versions.update([], oldest_needed=1)
    assert versions.peak_versions == 1
    assert versions.peak_nbytes == 0
