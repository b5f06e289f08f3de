"""`optimizer.state` is the user's: what is cleared, removed, replaced, edited or loaded there acts as in torch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from support.jobs import Launcher, part_of

Edit = Callable[[Any, dict[str, Any]], None]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 97), nn.Tanh(), nn.Linear(97, 3)).to(dtype)


KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),  # its first steps are lr * sign(g), however g is rounded
}


def make(kind: str, module: nn.Module) -> Any:
    cls, options = KINDS[kind]
    return cls(module.parameters(), **options)


def first(optimizer: Any) -> Tensor:
    return optimizer.param_groups[0]["params"][0]  # type: ignore[no-any-return]


def moment(optimizer: Any) -> str:
    return next((name for name in optimizer.state[first(optimizer)] if name != "step"), "")


def clear(optimizer: Any, initial: dict[str, Any]) -> None:
    optimizer.state.clear()


def replace_the_dict(optimizer: Any, initial: dict[str, Any]) -> None:
    optimizer.state = defaultdict(dict)


def pop(optimizer: Any, initial: dict[str, Any]) -> None:
    optimizer.state.pop(first(optimizer), None)


def empty(optimizer: Any, initial: dict[str, Any]) -> None:
    optimizer.state[first(optimizer)] = {}


def load_initial(optimizer: Any, initial: dict[str, Any]) -> None:
    optimizer.load_state_dict(initial)


def load_own(optimizer: Any, initial: dict[str, Any]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace_a_tensor(optimizer: Any, initial: dict[str, Any]) -> None:
    for values in optimizer.state.values():
        name = next((n for n in values if n != "step"), None)
        if name is not None:
            values[name] = torch.full_like(values[name], 0.25)


def edit_a_tensor(optimizer: Any, initial: dict[str, Any]) -> None:
    for values in optimizer.state.values():
        for name, tensor in values.items():
            if name != "step":
                tensor.fill_(0.5)


def replace_the_step(optimizer: Any, initial: dict[str, Any]) -> None:
    for values in optimizer.state.values():
        if "step" in values:
            values["step"] = torch.tensor(0.0)


def edit_the_step(optimizer: Any, initial: dict[str, Any]) -> None:
    for values in optimizer.state.values():
        if "step" in values:
            values["step"].fill_(7)


def add_an_entry(optimizer: Any, initial: dict[str, Any]) -> None:
    for values in optimizer.state.values():
        values["note"] = "of the user's own"


def drop_momentum(optimizer: Any, initial: dict[str, Any]) -> None:
    for values in optimizer.state.values():
        values["momentum_buffer"] = None


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        clear, replace_the_dict, pop, empty, load_initial, load_own, replace_a_tensor, edit_a_tensor, replace_the_step,
        edit_the_step, add_an_entry, drop_momentum,
    )
}  # fmt: skip


def in_torch(kind: str, edit: Edit) -> tuple[list[Tensor], dict[str, Any]]:
    module = net()
    optimizer = make(kind, module)
    initial = copy.deepcopy(optimizer.state_dict())
    x = torch.linspace(-1, 1, 10 * 96).view(10, 96)
    for step in range(6):
        if step == 3:
            edit(optimizer, initial)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()], optimizer.state_dict()["state"]


def edited(strategy: muster.Strategy, kind: str, edit: str) -> Any:
    module = net()
    optimizer = make(kind, module)
    initial = copy.deepcopy(optimizer.state_dict())
    model, _ = strategy.prepare(module, optimizer)
    x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))
    for step in range(6):
        if step == 3:
            EDITS[edit](optimizer, initial)
            strategy.barrier()
        strategy.step(lambda x: model(x).square().mean(), x)
    return [p.detach() for p in module.parameters()], optimizer.state_dict()["state"]


def assert_as_torch(parameters: Any, state: Any, expected: tuple[list[Tensor], dict[str, Any]]) -> None:
    for own, other in zip(parameters, expected[0], strict=True):
        torch.testing.assert_close(torch.as_tensor(own), other, rtol=1e-4, atol=2e-6)
    assert state.keys() == expected[1].keys()
    for number, values in expected[1].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(torch.as_tensor(state[number][name]), value, rtol=1e-3, atol=1e-5)
            elif value is not None:
                assert state[number][name] == value


def works_in_torch(kind: str, edit: str) -> bool:
    """torch's Adagrad has no way to start anew, but in the newest versions."""
    return kind != "adagrad" or edit not in ("clear", "replace_the_dict", "pop", "empty")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("fuse", [True, False])
def test_edits_act_as_in_torch(kind: str, edit: str, fuse: bool) -> None:
    if not works_in_torch(kind, edit):
        pytest.skip("an error in torch")
    with muster.MirroredStrategy(["cpu"], fuse=fuse) as strategy:
        parameters, state = edited(strategy, kind, edit)
    assert_as_torch(parameters, state, in_torch(kind, EDITS[edit]))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["common", "sharded"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_edits_on_all_workers_act_as_in_torch(
    worker_job: Launcher, edit: str, options: dict[str, Any], kind: str
) -> None:
    if kind == "sgd" and edit in ("edit_a_tensor", "replace_a_tensor") and options:
        pytest.skip("a shard has nothing of some parameters")
    expected = in_torch(kind, EDITS[edit])
    for parameters, state in worker_job(edited, kind, edit, keep_gradients=False, **options):
        assert_as_torch(parameters, state, expected)


@pytest.fixture
def strategy() -> Iterator[muster.MirroredStrategy]:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        yield strategy


def train(strategy: muster.Strategy, model: Any, steps: int = 1) -> None:
    for _ in range(steps):
        strategy.step(lambda x: model(x).square().mean(), torch.linspace(-1, 1, 4 * 96).view(4, 96))


def test_adagrad_starts_anew_from_its_initial_value(strategy: muster.MirroredStrategy) -> None:
    module = net()
    model, optimizer = strategy.prepare(module, make("adagrad", module))
    train(strategy, model, 3)
    optimizer.state.clear()
    train(strategy, model)
    assert [float(values["step"]) for values in optimizer.state.values()] == [1.0] * 4


def test_adagrad_starts_anew_what_has_a_gradient(strategy: muster.MirroredStrategy) -> None:
    module = nn.ModuleList([net(), nn.Linear(2, 2)])
    model, optimizer = strategy.prepare(module, torch.optim.Adagrad(module.parameters()))
    assert len(optimizer.state) == 6
    train(strategy, model[0])
    optimizer.state.clear()
    train(strategy, model[0])
    assert list(optimizer.state) == list(module[0].parameters())


def test_what_was_taken_out_keeps_its_values(strategy: muster.MirroredStrategy) -> None:
    module = net()
    model, optimizer = strategy.prepare(module, make("adam", module))
    train(strategy, model, 2)
    values = dict(optimizer.state[module[0].weight])
    kept = copy.deepcopy(values)
    optimizer.state.clear()
    train(strategy, model, 2)
    for name, tensor in kept.items():
        assert torch.equal(values[name], tensor), name
    optimizer.state[module[0].weight] = values
    train(strategy, model)
    assert float(optimizer.state[module[0].weight]["step"]) == 3


def test_dicts_and_tensors_stay_the_same_objects(strategy: muster.MirroredStrategy) -> None:
    module = net()
    model, optimizer = strategy.prepare(module, make("adam", module))
    train(strategy, model)
    state, values = optimizer.state, optimizer.state[module[0].weight]
    tensors = dict(values)
    values["mine"] = 5
    train(strategy, model, 3)
    assert optimizer.state is state
    assert state[module[0].weight] is values
    assert values == {**tensors, "mine": 5}
    assert all(values[name] is tensor for name, tensor in tensors.items())


def test_a_part_of_the_state_alone_is_refused_by_name(strategy: muster.MirroredStrategy) -> None:
    module = net()
    model, optimizer = strategy.prepare(module, make("adam", module))
    train(strategy, model)
    values = optimizer.state[module[0].weight]
    taken = values.pop("exp_avg")
    before = module[2].weight.detach().clone()
    with pytest.raises(muster.InvalidArgument, match="'exp_avg'"):
        train(strategy, model)
    assert torch.equal(module[2].weight, before)
    values["exp_avg"] = taken
    train(strategy, model)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_low_precision_state_is_loaded_as_it_was_saved(strategy: muster.MirroredStrategy, kind: str) -> None:
    """torch rounds loaded state to the parameters' dtype."""
    module = net(torch.bfloat16)
    model, optimizer = strategy.prepare(module, make(kind, module))
    for _ in range(3):
        strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 96, dtype=torch.bfloat16))
    saved = copy.deepcopy(optimizer.state_dict())
    other = net(torch.bfloat16)
    alone = make(kind, other)
    with muster.MirroredStrategy(["cpu"]) as second:
        second.prepare(other, alone)
        other.load_state_dict(module.state_dict())
        alone.load_state_dict(saved)
        for number, values in alone.state_dict()["state"].items():
            for name, value in values.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, saved["state"][number][name]), name
        name = moment(optimizer)
        alone.state_dict()
        second.step(lambda x: other(x).square().mean(), torch.ones(4, 96, dtype=torch.bfloat16))
        assert alone.state[first(alone)][name].dtype == torch.float32


def test_edits_in_a_pre_hook_count(strategy: muster.MirroredStrategy) -> None:
    module = net()
    model, optimizer = strategy.prepare(module, make("adam", module))
    train(strategy, model, 3)
    handle = optimizer.register_step_pre_hook(lambda *_: optimizer.state.clear())
    train(strategy, model)
    handle.remove()
    assert float(optimizer.state[module[0].weight]["step"]) == 1


def test_steps_by_hand_follow_edits_and_new_groups(strategy: muster.MirroredStrategy) -> None:
    module = net()
    optimizer = torch.optim.Adam(module[0].parameters())
    model, _ = strategy.prepare(module, optimizer)

    def by_hand() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 96)).square().mean().backward()
        optimizer.step()

    train(strategy, model, 2)
    optimizer.state.clear()
    by_hand()
    assert float(optimizer.state[module[0].weight]["step"]) == 1
    optimizer.add_param_group({"params": list(module[2].parameters())})
    before = module[2].weight.detach().clone()
    by_hand()
    assert not torch.equal(module[2].weight, before)
    assert float(optimizer.state[module[0].weight]["step"]) == 2
    train(strategy, model)
    assert float(optimizer.state[module[0].weight]["step"]) == 3
    assert float(optimizer.state[module[2].weight]["step"]) == 2


def grown(strategy: muster.Strategy) -> Any:
    module = net()
    optimizer = torch.optim.AdamW(module[0].parameters(), lr=1e-2)
    model, _ = strategy.prepare(module, optimizer)
    x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(module[2].parameters())})
        strategy.step(lambda x: model(x).square().mean(), x)
    return [p.detach() for p in module.parameters()], optimizer.state_dict()["state"]


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["common", "sharded"])
def test_new_groups_keep_the_state_of_all_workers(worker_job: Launcher, options: dict[str, Any]) -> None:
    module = net()
    optimizer = torch.optim.AdamW(module[0].parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 10 * 96).view(10, 96)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": list(module[2].parameters())})
        module.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    expected = ([p.detach() for p in module.parameters()], optimizer.state_dict()["state"])
    for parameters, state in worker_job(grown, keep_gradients=False, **options):
        assert_as_torch(parameters, state, expected)


def grown_by_complex(strategy: muster.Strategy) -> Any:
    module = nn.ModuleList([net(), nn.ParameterList([torch.ones(2, dtype=torch.complex64)])])
    optimizer = torch.optim.Adagrad(module[0].parameters(), lr=1e-2)
    model, _ = strategy.prepare(module, optimizer)
    x = part_of(strategy, torch.linspace(-1, 1, 10 * 96).view(10, 96))

    def step(x: Tensor) -> Tensor:
        return model[0](x).square().mean() + model[1][0].abs().sum()

    strategy.step(step, x)
    before = optimizer.state_dict()["state"].keys()
    optimizer.add_param_group({"params": list(module[1].parameters())})
    with pytest.raises(muster.InvalidArgument, match=r"parameter 4 .* complex64.*fuse=False"):
        strategy.step(step, x)
    assert optimizer.state_dict()["state"].keys() == before
    optimizer.param_groups.pop()
    assert strategy.step(step, x).stepped


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=["common", "sharded"])
def test_a_group_that_cannot_be_stepped_is_refused_by_name(worker_job: Launcher, options: dict[str, Any]) -> None:
    worker_job(grown_by_complex, keep_gradients=False, **options)


def with_sparse_momentum() -> tuple[nn.Embedding, torch.optim.SGD]:
    """torch's own, after steps: the momentum is as sparse as the gradients."""
    torch.manual_seed(0)
    module = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for rows in ([0, 2, 2], [5, 1]):
        optimizer.zero_grad()
        module(torch.tensor(rows)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def resume_sparse(strategy: muster.Strategy) -> Any:
    module, optimizer = with_sparse_momentum()
    if strategy.rank > 0:
        optimizer.state.clear()
    model, _ = strategy.prepare(module, optimizer)
    ids = part_of(strategy, torch.tensor([1, 2, 4, 2]))
    strategy.step(lambda ids: model(ids).square().mean(), ids)
    return module.weight.detach()


@pytest.mark.parametrize("fuse", [True, False])
def test_sparse_state_reaches_all_ranks(worker_job: Launcher, fuse: bool) -> None:
    module, optimizer = with_sparse_momentum()
    module(torch.tensor([1, 2, 4, 2])).square().mean().backward()
    optimizer.step()
    for weight in worker_job(resume_sparse, fuse=fuse, keep_gradients=False):
        torch.testing.assert_close(torch.as_tensor(weight), module.weight.detach())


class Averaging(torch.optim.Optimizer):
    """Of a user's own: state that torch's load_state_dict converts to the parameter's dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(average=torch.zeros(p.shape), seen=torch.zeros((), dtype=torch.long), kind="mean")
                state["average"].lerp_(p.grad.float(), 0.1)
                state["seen"] += 1
                with torch.no_grad():
                    p.sub_(group["lr"] * state["average"].to(p.dtype))


def exact_state(strategy: muster.Strategy, kind: str) -> Any:
    """Of an optimizer that has stepped before it is prepared."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2).to(torch.bfloat16 if kind == "own" else torch.float64)
    optimizer: Any = Averaging(module.parameters()) if kind == "own" else torch.optim.NAdam(module.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 24).view(8, 3).to(module.weight.dtype)
    for _ in range(3):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
    model, _ = strategy.prepare(module, optimizer)
    for _ in range(3):
        strategy.step(lambda x: model(x).square().mean(), part_of(strategy, x))
    state = optimizer.state[module.weight]
    dtypes = {name: str(value.dtype) for name, value in state.items() if isinstance(value, Tensor)}
    return [p.detach().double() for p in module.parameters()], dtypes, state.get("kind")


@pytest.mark.parametrize("kind", ["own", "nadam"])
def test_workers_take_over_state_as_it_is(worker_job: Launcher, kind: str) -> None:
    (parameters, dtypes, text), other = worker_job(exact_state, kind)
    assert dtypes == other[1]
    assert dtypes.items() >= ({"average": "torch.float32", "seen": "torch.int64"} if kind == "own" else {}).items()
    assert text == other[2] == ("mean" if kind == "own" else None)
    for own, theirs in zip(parameters, other[0], strict=True):
        assert (own == theirs).all()


def test_a_users_optimizer_resumes_with_its_state_as_it_was(tmp_path: Path) -> None:
    def run(steps: Sequence[int], resumes: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(3, 2).to(torch.bfloat16)
        with muster.MirroredStrategy(["cpu"]) as strategy:
            model, optimizer = strategy.prepare(module, Averaging(module.parameters()))
            if resumes:
                strategy.load(tmp_path / "saved")
            for step in steps:
                x = torch.full((4, 3), 0.1 * step).to(torch.bfloat16)
                strategy.step(lambda x: model(x).square().mean(), x)
            if not resumes and len(steps) == 3:
                strategy.save(tmp_path / "saved")
            assert optimizer.state[module.weight]["average"].dtype == torch.float32
            assert optimizer.state[module.weight]["seen"].dtype == torch.long
            return [p.detach().clone() for p in module.parameters()]

    expected = run(range(6), resumes=False)
    run(range(3), resumes=False)
    for own, theirs in zip(run(range(3, 6), resumes=True), expected, strict=True):
        assert torch.equal(own, theirs)


def own_keys_after_a_load(
    strategy: muster.Strategy, folder: Path, cls: type[torch.optim.Optimizer]
) -> tuple[list[dict[Any, Any]], dict[Any, Any]]:
    """An optimizer's state of all parameters together: after prepare() and a load(), and what `optimizer_state` has."""
    module = nn.Linear(3, 2)
    optimizer = cls(module.parameters(), lr=0.1)
    state: dict[Any, Any] = optimizer.state
    if strategy.rank == 0:
        state |= {"weight": {"of": "all", "mean": torch.ones(3)}, "seen": 7}
    model, _ = strategy.prepare(module, optimizer)

    def own() -> dict[Any, Any]:
        return {key: values for key, values in optimizer.state_dict()["state"].items() if isinstance(key, str)}

    def step() -> None:
        strategy.step(lambda x: model(x).square().mean(), part_of(strategy, torch.ones(4, 3)))

    step()
    found = [own()]
    strategy.save(folder)
    state["weight"], state["seen"] = {}, 0
    strategy.load(folder)
    found.append(own())
    step()
    strategy.barrier()
    return found, muster.checkpoint.optimizer_state(folder)["state"]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.RMSprop, {}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"shard_optimizer": True}),
        (torch.optim.SGD, {}),
    ],
)
def test_state_of_no_parameter_is_kept(
    worker_job: Launcher, tmp_path: Path, cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    for here, exported in worker_job(own_keys_after_a_load, tmp_path, cls, **options):
        for own in (*here, exported):
            assert own["seen"] == 7
            assert own["weight"]["of"] == "all"
            assert own["weight"]["mean"].tolist() == [1.0] * 3
        assert set(exported) - {"weight", "seen"} == (set() if cls is torch.optim.SGD else {0, 1})


def shared_rate(strategy: muster.Strategy) -> tuple[bool, float]:
    module = nn.Linear(3, 2)
    rate = torch.tensor(0.5)
    groups = [{"params": [p], "lr": rate} for p in module.parameters()]
    model, optimizer = strategy.prepare(module, torch.optim.SGD(groups, lr=rate, foreach=False))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(3):
        strategy.step(lambda x: model(x).square().mean(), part_of(strategy, torch.ones(4, 3)))
        schedule.step(1.0)
    one, other = (group["lr"] for group in optimizer.param_groups)
    return one is other, float(one)


def test_groups_that_share_a_learning_rate_share_it_on_all_workers(worker_job: Launcher) -> None:
    first, second = worker_job(shared_rate)
    assert first == second
    assert first[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_momentum_that_is_taken_out_begins_anew_in_any_precision(
    strategy: muster.MirroredStrategy, dtype: torch.dtype
) -> None:
    module = net(dtype)
    model, optimizer = strategy.prepare(module, make("sgd", module))
    x = torch.linspace(-1, 1, 4 * 96).view(4, 96).to(dtype)

    def step() -> None:
        strategy.step(lambda x: model(x).float().square().mean(), x)

    for _ in range(3):
        step()
    masters = [values["master"].clone() for values in optimizer.state.values() if "master" in values]
    drop_momentum(optimizer, {})
    assert all(values["momentum_buffer"] is None for values in optimizer.state_dict()["state"].values())
    kept = [values["master"] for values in optimizer.state_dict()["state"].values() if "master" in values]
    assert all(map(torch.equal, masters, kept))
    twin = copy.deepcopy(module)
    twin(x).float().square().mean().backward()
    gradients = [parameter.grad.float() for parameter in twin.parameters() if parameter.grad is not None]
    step()
    for gradient, values in zip(gradients, optimizer.state.values(), strict=True):
        # Not less the dampening, as of a buffer of zeros.
        torch.testing.assert_close(values["momentum_buffer"], gradient, rtol=2e-2, atol=1e-5)


def test_clearing_drops_a_master_copy_that_stands_alone(strategy: muster.MirroredStrategy) -> None:
    module = net(torch.bfloat16)
    model, optimizer = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    x = torch.linspace(-1, 1, 4 * 96).view(4, 96).bfloat16()
    strategy.step(lambda x: model(x).float().square().mean(), x)
    rounded = module[0].weight.detach().float()
    assert not torch.equal(optimizer.state[module[0].weight]["master"], rounded)
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.0
    strategy.step(lambda x: model(x).float().square().mean(), x)
    assert torch.equal(optimizer.state[module[0].weight]["master"], rounded)


@pytest.mark.parametrize(("option", "text"), [("lr", "0.1"), ("betas", ("0.9", 0.999)), ("eps", "1e-8")])
def test_a_hyperparameter_in_words_is_refused_by_name(
    strategy: muster.MirroredStrategy, option: str, text: Any
) -> None:
    module = net()
    model, optimizer = strategy.prepare(module, make("adam", module))
    train(strategy, model)
    optimizer.param_groups[0]["note"] = "of the user's own"
    train(strategy, model)
    optimizer.param_groups[0][option] = text
    with pytest.raises(muster.InvalidArgument, match=f"option '{option}' of group 0 of Adam"):
        train(strategy, model)


def test_adagrad_starts_at_its_initial_value_after_its_state_was_cleared() -> None:
    def stepped(clears: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        optimizer = muster.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.5)
        if clears:
            optimizer.state.clear()
        with muster.MirroredStrategy(["cpu"], threads_per_replica=1) as strategy:
            model, _ = strategy.prepare(module, optimizer)
            strategy.step(lambda x: model(x).square().mean(), torch.ones(4, 3))
        return [parameter.detach() for parameter in module.parameters()]

    assert all(map(torch.equal, stepped(clears=True), stepped(clears=False)))
