from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.strategy import AXES, Mesh

meshes = st.builds(Mesh, pipeline=st.integers(1, 4), data=st.integers(1, 4), tensor=st.integers(1, 4))


@given(meshes)
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(**mesh.coordinates(rank)) for rank in range(mesh.num_devices)] == list(range(mesh.num_devices))


@given(meshes, st.sampled_from(AXES))
def test_groups_of_an_axis_part_the_ranks(mesh: Mesh, axis: str) -> None:
    groups = {mesh.group(axis, rank) for rank in range(mesh.num_devices)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_devices))
    assert {len(group) for group in groups} == {getattr(mesh, axis)}


@given(meshes, st.sampled_from(AXES))
def test_a_group_lists_its_ranks_in_order_along_the_axis(mesh: Mesh, axis: str) -> None:
    for rank in range(mesh.num_devices):
        group = mesh.group(axis, rank)
        assert group[mesh.coordinates(rank)[axis]] == rank


def test_tensor_ranks_are_neighbours_and_stages_far_apart() -> None:
    mesh = Mesh(pipeline=2, data=2, tensor=2)
    assert mesh.group("tensor", 0) == (0, 1)
    assert mesh.group("data", 0) == (0, 2)
    assert mesh.group("pipeline", 0) == (0, 4)


def test_the_layout_is_the_one_torch_gives_a_device_mesh_of_this_shape() -> None:
    """Rank = ((pipeline · |data|) + data) · |tensor| + tensor."""
    mesh = Mesh(pipeline=2, data=3, tensor=2)
    assert mesh.shape == (2, 3, 2)
    assert mesh.coordinates(9) == {"pipeline": 1, "data": 1, "tensor": 1}


@pytest.mark.parametrize("rank", [0, 5])
def test_an_axis_left_out_counts_as_0(rank: int) -> None:
    assert Mesh(data=8).rank(data=rank) == rank
    assert Mesh(data=8).rank() == 0
