"""The PipeDream family against the papers' update rules: not close, equal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import spawn
from stale_training import Case, build_batches, build_optimizer, build_stages, loss, make_batch, simulate
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
        for model in ("mlp", "cnn")
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
    values = {"stage": stage, "stage_names": names, "loss": loss} | changes
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
        "notes": executor.notes,
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


ALL = [case for model in ("mlp", "cnn", "gpt") for num_stages in (2, 4) for case in cases(model, num_stages)]


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
        assert held.parameters == versions * rank["parameters"]
        assert held.gradients == rank["parameters"]
        # momentum: one number per weight; Adam: two, and a step count per tensor
        copies = held.optimizer_state // rank["parameters"]
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


def train_tied(rank: int) -> tuple[list[str], dict[str, float]]:
    case = Case(model="gpt", num_stages=2, schedule="pipedream", num_micro_batches=1, optimizer="sgd")
    original = "transformer.wte.weight"
    stages = [nn.Sequential(nn.Embedding(11, 8)), nn.Sequential()]
    stages[1].add_module("lm_head", nn.Linear(8, 11, bias=False))
    stage = stages[rank].double()
    with torch.no_grad():
        next(stage.parameters()).fill_(0.5)
    names = dict.fromkeys(stage.state_dict(), original)
    executor = build_executor(case, stage=stage, stage_names=names)
    executor.step(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 3], [4, 5]]))
    executor.flush()
    return executor.notes, {name: float(tensor.abs().sum()) for name, tensor in executor.state().items()}


def test_weights_tied_across_stages_are_untied_and_said_so() -> None:
    (notes, state), (other_notes, _) = spawn(train_tied, 2)
    assert notes == other_notes
    assert len(notes) == 1
    assert notes[0].startswith("transformer.wte.weight is on stages 0 and 1 and is untied")
    assert set(state) == {"transformer.wte.weight", "lm_head.weight"}
    assert state["transformer.wte.weight"] != state["lm_head.weight"]


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


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (Strategy(pipeline_parallel_size=2, schedule="1f1b", num_micro_batches=4), "use pipedream, pipedream-vsync"),
        (Strategy(pipeline_parallel_size=2, tensor_parallel_size=2, schedule="pipedream"), "use schedule=1f1b"),
    ],
)
def test_strategies_of_other_executors_are_refused(strategy: Strategy, reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        PipeDream(
            stage=nn.Linear(2, 2),
            stage_names={},
            strategy=strategy,
            groups=build_groups(Strategy().mesh, CPU),
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            device=CPU,
        )
