"""The PipeDream family against the papers' update rules: not close, equal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from stale_training import Case, build_batches, build_optimizer, build_stages, loss, make_batch, simulate, ties
from torch import nn

from meshwise.errors import ModelError, RunError, StrategyError
from meshwise.run.executor import evaluate_outputs
from meshwise.run.groups import Groups, build_groups
from meshwise.run.pipedream import PipeDream
from meshwise.strategy import Mesh, Strategy
from meshwise.strategy.schedule import weight_versions

CPU = torch.device("cpu")
VERSIONS = {"pipedream": [4, 3, 2, 1], "pipedream-vsync": [4, 4, 4, 4], "pipedream-2bw": [2, 2, 2, 2]}


def cases(model: str, num_stages: int) -> list[Case]:
    settings = [("pipedream", 1, 24), ("pipedream", 2, 12), ("pipedream-vsync", 2, 12)]
    settings += [("pipedream-2bw", num_stages, 12), ("pipedream-2bw", 2 * num_stages, 8)]
    return [
        Case(
            model=model,
            num_stages=num_stages,
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            optimizer=optimizer,
            checkpointing=checkpointing,
            num_steps=num_steps,
            flush_after=num_steps // 2 + 1,
        )
        for schedule, num_micro_batches, num_steps in settings
        for optimizer, checkpointing in (("sgd", "none"), ("adam", "none"), ("sgd", "full"), ("adam", "selective"))
    ]


def replicated_cases() -> list[Case]:
    return [
        Case(model=model, num_stages=2, schedule=schedule, num_micro_batches=2, optimizer="adam", num_replicas=2)
        for model in ("mlp", "cnn", "tied")
        for schedule in VERSIONS
    ]


def strategy_of(case: Case) -> Strategy:
    return Strategy(
        pipeline_parallel_size=case.num_stages,
        data_parallel_size=case.num_replicas,
        schedule=case.schedule,
        num_micro_batches=case.num_micro_batches,
        checkpointing=case.checkpointing,
        precision="fp64",
    )


@functools.cache
def groups_for(mesh: Mesh) -> Groups:
    """One set of groups for all cases of a process: making them takes longer than training."""
    return build_groups(mesh, CPU)


def build_executor(case: Case, **changes: Any) -> PipeDream:
    strategy = strategy_of(case)
    groups = groups_for(strategy.mesh)
    index = groups.index("pipeline")
    stage = build_stages(case)[index]
    names = {name: f"stage{index}.{name}" for name in stage.state_dict()}
    tied = [dict(uses) for uses in ties(case)]
    values = {"stage": stage, "stage_names": names, "loss": loss, "tied": tied} | changes
    return PipeDream(
        strategy=strategy,
        groups=groups,
        optimizer=lambda parameters: build_optimizer(case, list(parameters)),
        device=CPU,
        **values,
    )


def train(rank: int, wanted: list[Case]) -> dict[str, dict[str, Any]]:
    """Every case on these ranks, one after the other."""
    return {str(case): train_one(case) for case in wanted}


def train_one(case: Case) -> dict[str, Any]:
    executor = build_executor(case)
    losses = []
    for step, per_replica in enumerate(build_batches(case)):
        executor.optimizer.param_groups[0]["lr"] = case.learning_rate(step)
        result = executor.step(*per_replica[executor.groups.index("data")])
        losses.append(None if result.loss is None else float(result.loss))
        if step + 1 == case.flush_after:
            executor.flush()
    executor.flush()
    held = executor.held()
    state = {name: tensor.numpy() for name, tensor in executor.state().items()}
    generator = torch.Generator().manual_seed(5)
    evaluations = [executor.evaluate(*make_batch(case.model, size, generator)) for size in (3, 5)]
    return {
        "losses": losses,
        "state": state,
        "versions": executor.max_weight_versions,
        "held": held,
        "parameters": sum(p.nbytes for p in executor.stage.parameters()),
        "evaluations": evaluations,
        "training": all(module.training for module in executor.stage.modules()),
        "updated": sum(p.nbytes for group in executor.optimizer.param_groups for p in group["params"]),
    }


@functools.cache
def trained(model: str, num_stages: int) -> list[dict[str, dict[str, Any]]]:
    return spawn(train, num_stages, cases(model, num_stages))


@functools.cache
def trained_replicated() -> list[dict[str, dict[str, Any]]]:
    return spawn(train, 4, replicated_cases())


@pytest.fixture(autouse=True)
def like_the_ranks() -> Any:
    """One thread and deterministic kernels, so that a sum is in the same order here and there."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def assert_same_training(case: Case, ranks: list[dict[str, Any]]) -> None:
    """``ranks`` of the first replica, by stage."""
    losses, states, stages = simulate(case)
    assert all(ranks[stage]["losses"] == [None] * case.num_steps for stage in range(case.num_stages - 1))
    assert ranks[-1]["losses"] == losses
    expected = {f"stage{index}.{name}": value for index, state in enumerate(states) for name, value in state.items()}
    found = ranks[0]["state"]
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), value), f"{name} differs"
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(*stages).eval()
    for size, evaluation in zip((3, 5), ranks[-1]["evaluations"]):
        inputs, targets = make_batch(case.model, size, generator)
        with torch.no_grad():
            outputs = model(inputs)
            assert evaluation == evaluate_outputs(outputs, targets, loss(outputs, targets))
    assert ranks[0]["evaluations"] == [None, None]


ALL = [case for model in ("mlp", "cnn", "gpt", "tied") for num_stages in (2, 4) for case in cases(model, num_stages)]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_equals_the_papers_update_rule_bit_for_bit(case: Case) -> None:
    ranks = trained(case.model, case.num_stages)
    assert_same_training(case, [rank[str(case)] for rank in ranks])


@pytest.mark.parametrize("case", ALL, ids=str)
def test_keeps_as_many_weight_versions_as_the_theory_says(case: Case) -> None:
    ranks = [rank[str(case)] for rank in trained(case.model, case.num_stages)]
    measured = [rank["versions"] for rank in ranks]
    assert measured == [weight_versions(strategy_of(case), stage) for stage in range(case.num_stages)]
    if case.num_stages == 4:
        assert measured == VERSIONS[case.schedule]
    for rank, versions in zip(ranks, measured):
        held = rank["held"]
        assert held.weight_versions == versions
        borrowed = rank["parameters"] - rank["updated"]
        # what is borrowed comes in the versions in use and the one about to arrive
        assert held.parameters == versions * rank["updated"] + 2 * borrowed
        if case.model != "tied":
            assert held.gradients == rank["parameters"]
        # momentum: one number per weight; Adam: two, and a step count per tensor
        copies = held.optimizer_state // rank["updated"]
        assert copies == (1 if case.optimizer == "sgd" else 2)


@pytest.mark.parametrize("case", replicated_cases(), ids=str)
def test_replicas_apply_the_mean_of_their_gradients(case: Case) -> None:
    ranks = [rank[str(case)] for rank in trained_replicated()]
    assert_same_training(case, [ranks[0], ranks[2]])  # ranks 1 and 3 are the second replica
    assert ranks[1]["state"] == {}
    assert ranks[3]["losses"] != ranks[2]["losses"]  # its own samples


def test_stale_weights_are_not_synchronous_training() -> None:
    """The equality above would mean little if staleness changed nothing."""
    finals = []
    for schedule in VERSIONS:
        case = Case(model="mlp", num_stages=4, schedule=schedule, num_micro_batches=4, optimizer="sgd")
        finals.append(simulate(case)[0][-1])
    assert len(set(finals)) == 3


def test_evaluation_leaves_the_stage_in_training_mode() -> None:
    assert all(result["training"] for rank in trained("cnn", 2) for result in rank.values())


def run_ahead(rank: int) -> float:
    """Stage 1 will not begin before stage 0 is done with both its warm-up forwards."""
    case = Case(model="mlp", num_stages=3, schedule="pipedream", num_micro_batches=1, optimizer="sgd")
    strategy = strategy_of(case)
    groups = build_groups(strategy.mesh, CPU)
    torch.manual_seed(0)
    stage = nn.Linear(6, 6).double()
    executor = PipeDream(
        stage=stage,
        stage_names={},
        strategy=strategy,
        groups=groups,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device=CPU,
    )
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["ahead"])
    inputs, targets = torch.ones(2, 6, dtype=torch.float64), torch.tensor([1, 2])
    for step in range(6):
        result = executor.step(inputs, targets)
        if rank == 0 and step == 1:
            store.set("ahead", "1")
    executor.flush()
    return 0.0 if result.loss is None else float(result.loss)


def test_a_stage_does_not_wait_for_the_next_to_take_its_activation() -> None:
    assert spawn(run_ahead, 3, timeout=60)[2] > 0


def train_shared_by_three(rank: int) -> tuple[dict[str, Any], float, int]:
    """Linear layers of 4 stages; those of stages 1, 2 and 3 are one."""
    case = Case(model="mlp", num_stages=4, schedule="pipedream-vsync", num_micro_batches=2, optimizer="sgd")
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6, bias=False)).double() for _ in range(4)]
    for stage in stages[2:]:
        stage[0].weight.data = stages[1][0].weight.detach().clone()
    names = {"0.weight": f"stage{rank}.weight"}
    executor = build_executor(case, stage=stages[rank], stage_names=names, tied=[dict.fromkeys((1, 2, 3), "0.weight")])
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        executor.step(*make_batch("mlp", 4, generator))
    executor.flush()
    after_flush = executor.state()
    result = executor.step(*make_batch("mlp", 4, generator))  # its first micro-batch sees what the flush left
    executor.flush()
    state = {name: tensor.numpy() for name, tensor in after_flush.items()}
    return state, 0.0 if result.loss is None else float(result.loss), len(executor.optimizer.state)


def test_a_weight_of_three_stages_has_one_value_and_the_sum_of_their_gradients() -> None:
    ranks = spawn(train_shared_by_three, 4)
    state, losses, optimized = ranks[0][0], [rank[1] for rank in ranks], [rank[2] for rank in ranks]
    torch.manual_seed(0)
    weights = [nn.Linear(6, 6, bias=False).double().weight.detach().clone() for _ in range(4)][:2]
    case = Case(model="mlp", num_stages=4, schedule="pipedream-vsync", num_micro_batches=2, optimizer="sgd")
    generator = torch.Generator().manual_seed(4)
    batches = [make_batch("mlp", 4, generator) for _ in range(4)]
    micro_batches = [pair for x, y in batches for pair in zip(x.chunk(2), y.chunk(2))]
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = build_optimizer(case, parameters)
    versions = [weights]
    for number, (inputs, targets) in enumerate(micro_batches[:6]):
        first, shared = (w.clone().requires_grad_() for w in versions[max(0, number - 3)])
        value = loss(inputs @ first.T @ shared.T @ shared.T @ shared.T, targets)
        for parameter, gradient in zip(parameters, torch.autograd.grad(value, [first, shared])):
            parameter.grad = gradient
        optimizer.step()
        versions.append([p.detach().clone() for p in parameters])
    first, shared = versions[-1]
    for name, found in state.items():
        torch.testing.assert_close(torch.as_tensor(found), first if name == "stage0.weight" else shared)
    assert (state["stage1.weight"] == state["stage2.weight"]).all()
    assert (state["stage1.weight"] == state["stage3.weight"]).all()
    expected = [loss(x @ first.T @ shared.T @ shared.T @ shared.T, y) for x, y in micro_batches[6:]]
    assert losses[3] == pytest.approx(float(torch.stack(expected).mean()))
    assert optimized == [1, 1, 0, 0]


def train_undeclared(rank: int) -> str:
    case = Case(model="tied", num_stages=2, schedule="pipedream", num_micro_batches=1, optimizer="sgd")
    (home, name), (_, other_name) = ties(case)[0]
    try:
        build_executor(case, stage_names={name if rank == home else other_name: "wte.weight"}, tied=[])
    except ModelError as caught:
        return str(caught)
    return ""


def test_a_weight_of_two_stages_is_not_trained_as_two() -> None:
    for message in spawn(train_undeclared, 2):
        assert message == ("wte.weight is on stages 0 and 1 and would be trained as two weights; name it in tied")


def train_bf16(rank: int) -> tuple[str, list[float]]:
    case = Case(model="mlp", num_stages=2, schedule="pipedream", num_micro_batches=2, optimizer="sgd")
    strategy = Strategy(pipeline_parallel_size=2, schedule="pipedream", num_micro_batches=2, precision="bf16")
    groups = build_groups(strategy.mesh, CPU)
    stage = build_stages(case)[rank].float()
    executor = PipeDream(
        stage=stage,
        stage_names={},
        strategy=strategy,
        groups=groups,
        loss=loss,
        optimizer=lambda parameters: build_optimizer(case, list(parameters)),
        device=CPU,
    )
    inputs, targets = make_batch("mlp", 4, torch.Generator().manual_seed(1))
    losses = [executor.step(inputs.float(), targets).loss for _ in range(30)]
    executor.flush()
    return str(next(stage.parameters()).dtype), [float(value) for value in losses if value is not None]


def test_bf16_learns_and_keeps_float32_weights() -> None:
    (dtype, _), (_, losses) = spawn(train_bf16, 2)
    assert dtype == "torch.float32"
    assert losses[-1] < 0.5 * losses[0]


def refuse(rank: int) -> list[str]:
    case = Case(model="mlp", num_stages=2, schedule="pipedream", num_micro_batches=2, optimizer="sgd")
    executor = build_executor(case)
    inputs, targets = make_batch("mlp", 4, torch.Generator().manual_seed(1))
    found = []
    for error, call in (
        (StrategyError, lambda: executor.step(inputs[:3], targets[:3])),
        (ModelError, lambda: build_executor(case, stage_names={"nothing": "x"})),
        (RunError, lambda: (executor.step(inputs, targets), executor.evaluate(inputs, targets))),
    ):
        try:
            call()
        except error as caught:
            found.append(str(caught))
    executor.flush()
    return found


def test_refusals_say_what_would_work() -> None:
    for batch, name, flight in spawn(refuse, 2):
        assert batch == "a batch of 3 does not divide into 2 micro-batches; use 2 samples"
        assert name == "the stage has no 'nothing'; name its own parameters and buffers in stage_names"
        assert flight.endswith("call flush() first")


def test_synchronous_strategies_are_refused() -> None:
    strategy = Strategy(pipeline_parallel_size=2, schedule="1f1b", num_micro_batches=4)
    with pytest.raises(StrategyError, match="use pipedream, pipedream-vsync"):
        PipeDream(
            stage=nn.Linear(2, 2),
            stage_names={},
            strategy=strategy,
            groups=build_groups(Strategy().mesh, CPU),
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            device=CPU,
        )
