"""Replicas behave as one module: what is read outside a step, and what is changed between calls."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import pickletools
import threading
import weakref
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import muster
from muster import Replicated, hooks

X = torch.linspace(-1, 1, 32).view(8, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
        self.gradient_checkpointing = False
        self.config = SimpleNamespace(scale=1.0, layers=[1, 2], inner=SimpleNamespace(shift=0.0))
        self.options = {"scale": 1.0}
        self.calls: list[int] = []
        self.mask = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.gradient_checkpointing else self.body(x)
        hidden = hidden * self.mask * self.config.scale * self.options["scale"] + self.config.inner.shift
        return self.heads["a"](hidden) + self.heads["b"](hidden)

    def training_step(self, x: Tensor, power: int = 2) -> Tensor:
        """The loss."""
        return self(x).pow(power).mean()

    def first_layer(self) -> nn.Module:
        return self.body[0]

    def set_scale(self, scale: float) -> None:
        self.config.scale = scale


def build() -> Net:
    torch.manual_seed(1)
    return Net()


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Job:
    """Two replicas, and the same model alone."""

    def __init__(self, make: Callable[[], nn.Module] = build) -> None:
        self.strategy = muster.MirroredStrategy(["cpu"] * 2)
        self.raw: Any = make()
        self.alone: Any = make()
        optimizer = torch.optim.SGD(self.raw.parameters(), lr=0.1)
        self.model, self.optimizer = self.strategy.prepare(self.raw, optimizer)
        self.alone_optimizer = torch.optim.SGD(self.alone.parameters(), lr=0.1)

    def step(self, fn: Callable[[Tensor], Any] | None = None, alone: Callable[[Tensor], Any] | None = None) -> None:
        """One step of both, whose losses and parameters must agree."""
        result = self.strategy.step(fn or (lambda x: loss_of(self.model, x)), X)
        self.alone_optimizer.zero_grad()
        loss = (alone or (lambda x: loss_of(self.alone, x)))(X)
        loss.backward()
        self.alone_optimizer.step()
        torch.testing.assert_close(float(result.loss), float(loss), rtol=1e-5, atol=1e-7)
        for a, b in zip(self.raw.parameters(), self.alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def both(self, change: Callable[[Any], Any]) -> None:
        change(self.raw)
        change(self.alone)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.strategy.close()


# --- what is read outside a step --------------------------------------------------------------------------------------
def test_what_was_read_outside_is_the_current_replicas_inside() -> None:
    with Job() as job:
        model = job.model
        body, head, step = model.body, model.heads["a"], model.training_step
        layers = [*model.body]
        children = dict(model.named_children())
        first, last = model.first_layer(), model.get_submodule("body.2.1")
        partial = functools.partial(model.training_step, power=2)
        other = model.heads["b"]

        def by_parts(x: Tensor) -> Tensor:
            hidden = body(x)
            assert torch.equal(layers[2](layers[1](layers[0](x))), hidden)
            assert torch.equal(layers[2][0](last(hidden)), layers[2][0](body[2][1](hidden)))
            assert torch.equal(first(x), children["body"][0](x))
            return (head(hidden) + other(hidden)).square().mean()

        for _ in range(3):
            job.step(by_parts)
            job.step(step)
            job.step(partial)


def test_parts_stand_for_what_they_are_parts_of() -> None:
    with Job() as job:
        model, raw = job.model, job.raw
        assert model.body is model.body and model.body[0] is model.body[0] and next(iter(model.body)) is model.body[0]
        assert dict(model.named_children())["body"] is model.body and model.first_layer() is model.body[0]
        assert (
            next(iter(model.heads.values())) is model.heads["a"] and dict(model.heads.items())["b"] is model.heads["b"]
        )
        assert isinstance(model.body, nn.Sequential) and isinstance(model.body[0], nn.Linear)
        assert isinstance(model.body, Replicated) or type(model.body) is Replicated
        assert model.body.module is raw.body and "a" in model.heads and len(model.heads) == 2
        assert [id(p) for p in model.body.parameters()] == [id(p) for p in raw.body.parameters()]
        assert list(model.body.state_dict()) == list(raw.body.state_dict())
        assert model.body.eval() is model.body and not raw.body[1].training and raw.training
        assert list(job.strategy.run(lambda x: model.body[1].training, X)) == [False, False]
        model.body[0].load_state_dict(
            {name: torch.zeros_like(value) for name, value in raw.body[0].state_dict().items()}
        )
        assert raw.body[0].weight.abs().sum() == 0
        model.body[1].p = 0.25
        assert list(job.strategy.run(lambda x: model.body[1].p, X)) == [0.25, 0.25]


def test_a_method_is_still_that_method() -> None:
    with Job() as job:
        method = job.model.training_step
        assert method.__name__ == "training_step" and method.__doc__ == "The loss."
        assert list(inspect.signature(method).parameters) == ["x", "power"]
        assert method.__func__ is Net.training_step and method.__self__ is job.model
        assert method == job.model.training_step and hash(method) == hash(job.model.training_step)
        assert torch.equal(method(X, power=3), job.raw.training_step(X, power=3))
        assert torch.equal(copy.deepcopy(method)(X), job.raw.training_step(X))


def test_an_optimizer_of_a_part_trains_that_part() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        raw = build()
        model = strategy.prepare(raw)
        optimizer = strategy.prepare(torch.optim.SGD(model.heads["a"].parameters(), lr=0.1))
        before = copy.deepcopy(raw.state_dict())
        assert strategy.step(lambda x: loss_of(model, x), X, optimizers=optimizer).stepped
        changed = [name for name, value in raw.state_dict().items() if not torch.equal(value, before[name])]
        assert changed == ["heads.a.weight", "heads.a.bias"]


def test_attributes_set_inside_a_step_are_the_replicas_own() -> None:
    with Job() as job:
        model, strategy = job.model, job.strategy

        def remember(x: Tensor) -> int:
            model.seen = strategy.replica
            strategy.barrier()
            model.body.eval() if strategy.replica == 0 else model.body.train()
            strategy.barrier()
            return int(model.seen), model.body.training

        assert list(strategy.run(remember, X)) == [(0, False), (1, True)]


class Alike(nn.Linear):
    """Equal to any other of its shape."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike) and self.weight.shape == other.weight.shape

    __hash__ = nn.Module.__hash__


def test_attributes_set_inside_a_step_are_the_replicas_own_where_modules_are_equal() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.prepare(Alike(4, 1))

        def remember(x: Tensor) -> int:
            if strategy.replica == 1:
                strategy.barrier()
            model.seen = strategy.replica
            if strategy.replica == 0:
                strategy.barrier()
            strategy.barrier()
            return int(model.seen)

        assert list(strategy.run(remember, X)) == [0, 1]


def test_an_attribute_that_some_replicas_have_is_deleted_there() -> None:
    with Job() as job:
        job.raw.extra = 1
        del job.model.extra
        assert not hasattr(job.raw, "extra")
        job.model.extra = 1
        del job.model.extra
        assert list(job.strategy.run(lambda x: hasattr(job.model, "extra"), X)) == [False, False]
        with pytest.raises(AttributeError, match="extra"):
            del job.model.extra


class Moved(nn.Linear):
    """Notes which of its methods are called."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.called: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._noting(name, value) if name in ON_ALL else value

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            return self if name in ON_NO_CPU else method(*args, **kwargs)

        return noting


ON_NO_CPU = ("cuda", "ipu", "mtia", "xpu")
ON_ALL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("train", "eval", "requires_grad_", "zero_grad", "half", "bfloat16", "double", "float"), ()),
    **dict.fromkeys(("compile", "cpu", "share_memory", *ON_NO_CPU), ()),
    "to": (torch.float64,), "type": (torch.float32,), "to_empty": (), "apply": (lambda module: None,),
    "register_buffer": ("late", torch.zeros(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_ALL)
def test_methods_that_change_the_module_change_that_of_every_replica(name: str) -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.prepare(Moved())
        options = {"device": "cpu"} if name == "to_empty" else {}
        result = getattr(model, name)(*ON_ALL[name], **options)
        assert result is (None if name in ("zero_grad", "compile", "register_buffer") else model)
        assert [name in called for called in strategy.run(lambda x: [*model.called], X)] == [True, True]


class OnMeta:
    """What a prepared module knows of a strategy whose devices are no CPU."""

    devices = (torch.device("meta"),) * 2
    current_local_replica = -1


@pytest.mark.parametrize("name", ["to", "cpu", "to_empty"])
def test_a_module_that_is_moved_stays_on_the_devices_of_its_replicas(name: str) -> None:
    owner: Any = OnMeta()
    modules = [nn.Linear(4, 1) for _ in owner.devices]
    model = Replicated(modules, weakref.ref(owner), 0)
    assert getattr(model, name)(**({} if name == "cpu" else {"device": "cpu"})) is model
    assert [module.weight.device.type for module in modules] == ["meta", "meta"]


def test_a_module_that_was_emptied_is_loaded_and_trains_on() -> None:
    with Job() as job:
        values = copy.deepcopy(job.raw.state_dict())
        job.model.to_empty(device="cpu")
        job.model.load_state_dict(values)
        for _ in range(2):
            job.step()


def test_a_prepared_module_is_true_and_equal_to_its_module() -> None:
    with Job() as job:
        model, raw = job.model, job.raw
        assert model and model.body and not job.strategy.prepare(nn.Sequential())
        assert model == raw and raw == model and model != model.body and model.body == raw.body and model != 1
        assert hash(model) == hash(raw) and model.body in {*raw.modules()} and raw.body in [model.body]
        assert {raw.heads: 1}[model.heads] == 1


def test_a_shallow_copy_is_no_part_of_the_job() -> None:
    with Job() as job:
        for part, raw in ((job.model, job.raw), (job.model.body, job.raw.body)):
            copied = copy.copy(part)
            assert copied is not raw and type(copied) is type(raw)
            copied.seen = 1
            assert not hasattr(raw, "seen")
            assert [id(p) for p in copied.parameters()] == [id(p) for p in raw.parameters()]


def test_copies_and_pickles_of_parts_are_plain() -> None:
    with Job() as job:
        for part, kind in ((job.model, Net), (job.model.body, nn.Sequential), (job.model.body[0], nn.Linear)):
            assert type(copy.deepcopy(part)) is kind and type(pickle.loads(pickle.dumps(part))) is kind


@pytest.mark.parametrize("closed", [False, True])
def test_pickles_name_nothing_of_muster(closed: bool) -> None:
    strategy = muster.MirroredStrategy(["cpu"] * 2)
    raw = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.SyncBatchNorm(4))
    model = strategy.prepare(raw)
    strategy.run(lambda x: model[0](x), X)
    if closed:
        strategy.close()
    for saved in (raw, copy.deepcopy(raw), model, model[1], {"a": model, "b": model[1]}):
        file = io.BytesIO()
        torch.save(saved, file, _use_new_zipfile_serialization=False)
        text = pickle.dumps(saved)
        names = [str(argument) for _, argument, _ in pickletools.genops(text)]
        assert not [name for name in names if "muster" in name]
        assert b"muster" not in file.getvalue()
    both = pickle.loads(pickle.dumps({"a": model, "b": model[1]}))
    assert both["a"][1] is both["b"]
    strategy.close()


def test_the_prepared_module_can_still_be_scripted_and_traced() -> None:
    raw = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        strategy.prepare(raw)
        raw.eval()
        assert torch.equal(torch.jit.script(raw)(X), raw(X))
        assert torch.equal(torch.jit.trace(raw, X)(X), raw(X))
        assert torch.equal(torch.export.export(raw, (X,)).module()(X), raw(X))


# --- what cannot be ---------------------------------------------------------------------------------------------------
def raw_module(job: Job) -> Callable[[Tensor], Tensor]:
    return lambda x: loss_of(job.raw, x)


def raw_part(job: Job) -> Callable[[Tensor], Tensor]:
    body, heads = job.raw.body, job.raw.heads
    return lambda x: heads["a"](body(x)).mean()


def raw_method(job: Job) -> Callable[[Tensor], Tensor]:
    return job.raw.training_step  # type: ignore[no-any-return]


def raw_parameter(job: Job) -> Callable[[Tensor], Tensor]:
    weight = job.raw.body[0].weight
    return lambda x: (x @ weight.t()).mean()


@pytest.mark.parametrize("use", [raw_module, raw_part, raw_method, raw_parameter])
def test_a_gradient_for_another_replicas_parameter_is_always_an_error(
    use: Callable[[Job], Callable[[Tensor], Tensor]],
) -> None:
    with Job() as job:
        step = use(job)
        for _ in range(10):
            with pytest.raises(muster.InvalidArgument, match=r"replica 0.*step of (local )?replica 1.*prepare\(\)"):
                job.strategy.step(step, X)
        job.step()


def test_another_replicas_buffers_are_out_of_reach() -> None:
    raw = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _ = strategy.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        norm = raw[1]
        for call in (strategy.step, strategy.run):
            for _ in range(5):
                with pytest.raises(muster.InvalidArgument, match="replica 0 was called in the step of local replica 1"):
                    call(lambda x: norm(model[0](x)).square().mean(), X)
        before = int(norm.num_batches_tracked)
        strategy.step(lambda x: model(x).square().mean(), X)
        assert norm.num_batches_tracked == before + 1


# --- what is changed between calls ------------------------------------------------------------------------------------
def scale_in_object(model: Any) -> None:
    model.config.scale = 0.5
    model.config.inner.shift = 0.25


def scale_in_dict(model: Any) -> None:
    model.options["scale"] = 2.0


def replace_dict(model: Any) -> None:
    model.options = {"scale": 3.0}


def method_that_changes(model: Any) -> None:
    model.set_scale(0.75)


def write_tensor(model: Any) -> None:
    model.mask[::2] = 0


def replace_tensor(model: Any) -> None:
    model.mask = torch.full((8,), 0.5)


def hook_on_part(model: Any) -> None:
    model.body[0].register_forward_hook(lambda module, args, output: output * 2)


def backward_hook_on_part(model: Any) -> None:
    model.body[2].register_full_backward_hook(lambda module, given, come: tuple(g * 3 for g in given))


def hook_on_parameter(model: Any) -> None:
    model.body[0].weight.register_hook(lambda gradient: gradient * 0)
    model.heads["a"].weight.register_hook(lambda gradient: gradient * 3)


def hook_after_accumulation(model: Any) -> None:
    def turn(parameter: Tensor) -> None:
        parameter.grad.mul_(-1)  # type: ignore[union-attr]

    model.body[0].weight.register_post_accumulate_grad_hook(turn)


def freeze(model: Any) -> None:
    model.body[0].weight.requires_grad_(False)


def checkpointing(model: Any) -> None:
    model.gradient_checkpointing = True


def other_forward(model: Any) -> None:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * 2

    model.body[0].forward = MethodType(forward, model.body[0])


CHANGES = [
    scale_in_object,
    scale_in_dict,
    replace_dict,
    method_that_changes,
    write_tensor,
    replace_tensor,
    hook_on_part,
    backward_hook_on_part,
    hook_on_parameter,
    hook_after_accumulation,
    freeze,
    checkpointing,
    other_forward,
]


@pytest.mark.parametrize("when", ["before prepare", "before the first step", "between steps"])
@pytest.mark.parametrize("change", CHANGES)
def test_replicas_follow_what_is_changed_in_the_module(change: Callable[[Any], None], when: str) -> None:
    def make() -> nn.Module:
        model = build()
        if when == "before prepare":
            change(model)
        return model

    with Job(make) as job:
        if when == "between steps":
            job.step()
        if when != "before prepare":
            job.both(change)
        job.step()
        job.step()


def write_and_replace(model: Any) -> None:
    model.options["scale"] = 2.0
    model.options = {"shift": 3.0}


def take_out_and_replace(model: Any) -> None:
    del model.options["first"]
    model.options = {"first": 7.0}


def write_and_replace_within(model: Any) -> None:
    model.options["inner"]["scale"] = 2.0
    model.options["inner"] = {"shift": 3.0}


@pytest.mark.parametrize("change", [write_and_replace, take_out_and_replace, write_and_replace_within])
def test_replicas_follow_what_was_written_and_then_replaced(change: Callable[[Any], None]) -> None:
    module: Any = nn.Linear(4, 1)
    module.options = {"first": 1.0, "inner": {"scale": 1.0}}
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.prepare(module)
        strategy.run(lambda x: model(x), torch.ones(2, 4))
        change(module)
        seen = strategy.run(lambda x: copy.deepcopy(model.options), torch.ones(2, 4))
    assert list(seen) == [module.options] * 2


def test_dropout_and_modes_follow_in_every_submodule() -> None:
    with Job() as job:
        job.raw.body[1].p = 1.0
        zeros = job.strategy.run(lambda x: float(job.model.body[1](x).abs().sum()), X)
        assert list(zeros) == [0.0, 0.0]
        job.raw.body[1].eval()
        assert all(total > 0 for total in job.strategy.run(lambda x: float(job.model.body[1](x).abs().sum()), X))


def test_hooks_come_and_go_with_their_handles() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
            self.seen.append(len(output))

    for on in (lambda job: job.raw.body[0], lambda job: job.model.body[0]):
        with Job() as job:
            recorder = Recorder()
            module = on(job).register_forward_hook(recorder.hook)
            parameter = job.raw.body[0].weight.register_hook(lambda gradient: gradient * 0)
            job.strategy.step(lambda x: loss_of(job.model, x), X)
            assert recorder.seen == [4, 4]
            module.remove()
            parameter.remove()
            before = job.raw.body[0].weight.detach().clone()
            job.strategy.step(lambda x: loss_of(job.model, x), X)
            assert recorder.seen == [4, 4] and not torch.equal(before, job.raw.body[0].weight)


def test_hooks_are_called_in_the_order_of_the_first_replicas() -> None:
    with Job() as job:
        layer = job.raw.body[0]
        layer.register_forward_hook(lambda module, args, output: output * 2)
        job.strategy.run(job.model.body[0], X)
        layer.register_forward_hook(lambda module, args, output: output + 1, prepend=True)
        parts = job.strategy.run(job.model.body[0], torch.ones(4, X.shape[1]))
        expected = (nn.functional.linear(torch.ones(2, X.shape[1]), layer.weight, layer.bias) + 1) * 2
        for part in parts:
            assert torch.equal(part, expected)


def test_a_parameters_own_attributes_are_every_replicas() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 1))
            self.weight.scales = [2.0, 3.0]  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight * sum(self.weight.scales)  # type: ignore[attr-defined]

    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.prepare(Scaled())
        assert [part.flatten().tolist() for part in strategy.run(model, torch.ones(2, 3))] == [[15.0], [15.0]]


class Noted(nn.Module):
    """With a hook that is a function over the module, as programs define them in a constructor."""

    def __init__(self, *, is_decorated: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.seen = torch.zeros(())
        factor = 2.0

        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            self.seen = output.detach().sum() * factor

        self.linear.register_forward_hook(torch.no_grad()(note) if is_decorated else note)


@pytest.mark.parametrize("is_decorated", [False, True])
def test_a_hook_that_is_a_function_over_the_module_is_each_replicas_own(is_decorated: bool) -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.prepare(Noted(is_decorated=is_decorated))
        x = torch.arange(12.0).view(4, 3)
        for hook in (None, lambda module, args, output: setattr(model, "seen", model.seen + 1)):
            if hook is not None:
                model.linear.register_forward_hook(hook)
            both = list(strategy.run(lambda x: (float(model.linear(x).sum() * 2), float(model.seen)), x))
            assert all(abs(seen - expected - (hook is not None)) < 1e-4 for expected, seen in both)
            assert both[0] != both[1]


class Features:
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.found["x"] = output


FOUND: list[Tensor] = []


def into_global(module: nn.Module, args: Any, output: Tensor) -> None:
    FOUND.append(output)


WRAPPED: list[Tensor] = []


def into_wrapped(module: nn.Module, args: Any, output: Tensor) -> None:
    WRAPPED.append(output)


def into_nothing(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.relu(output)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_hooks_that_hold_what_replicas_share_are_named(
    replicas: int, is_prepared: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_warned", set())
    found: dict[str, Tensor] = {}
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(2, 1)))

    made: dict[str, Any] = {}
    exec("def without_a_module(module, args, output): pass", made)

    def register() -> None:
        module[0].register_forward_hook(made["without_a_module"])
        module[0].register_forward_hook(torch.no_grad()(into_wrapped))
        module[0].register_forward_hook(lambda module, args, output: found.__setitem__("h", output))
        module[1].register_forward_hook(Features())
        module[1].register_full_backward_hook(into_global)
        module[1].register_forward_hook(into_nothing)
        module[2].register_forward_hook(functools.partial(lambda store, module, args, output: None, found))

    if not is_prepared:
        register()
    with muster.MirroredStrategy(["cpu"] * replicas) as strategy:
        model = strategy.prepare(module)
        if is_prepared:
            register()
        for _ in range(2):
            strategy.run(model, torch.ones(4, 3))
    texts = [record.message for record in caplog.records if "several replicas at once" in record.message]
    if replicas == 1:
        assert not texts
        return
    assert len(texts) == 5
    for what in ("WRAPPED", "<lambda>", "found", "Features.found", "into_global", "FOUND", "argument 0"):
        assert sum(what in text for text in texts) >= 1, what


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.count = 0
        self.log: list[int] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        self.log.append(len(x))
        self.last = self.linear(x)
        return self.last


def test_what_forward_writes_stays_the_replicas_own() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        raw = Counting()
        model, _ = strategy.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        for _ in range(2):
            strategy.step(lambda x: loss_of(model, x), X[:7])
        state = lambda x: (model.count, list(model.log), len(model.last))  # noqa: E731
        assert list(strategy.run(state, X)) == [(8, [4, 4], 4), (6, [3, 3], 3)]
        raw.log.clear()
        raw.count = 100
        assert list(strategy.run(state, X)) == [(100, [], 4), (100, [], 3)]


def test_what_cannot_be_copied_is_shared() -> None:
    with Job() as job:
        job.raw.lock = threading.Lock()
        assert list(job.strategy.run(lambda x: job.model.lock is job.raw.lock, X)) == [True, True]


def test_what_cannot_be_copied_leaves_nothing_half_copied() -> None:
    with Job() as job:
        inner = [1, memoryview(b"of C"), 2]  # which nothing copies
        job.raw.outer = {"inner": inner}
        job.raw.inner = inner
        job.raw.outer_again = job.raw.outer
        seen = job.strategy.run(lambda x: (job.model.outer, job.model.inner, job.model.outer_again), X)
        for outer, own, again in seen:
            assert outer["inner"] == own == inner and again is outer


def test_a_parameter_or_submodule_that_was_added_or_replaced_is_refused_by_name() -> None:
    for change, match in (
        (lambda net: setattr(net.body, "0", nn.Linear(4, 8)), "submodule 'body.0' was replaced"),
        (lambda net: net.body.__delitem__(0), "submodule 'body.0' was replaced"),
        (lambda net: setattr(net.heads["a"], "bias", nn.Parameter(torch.zeros(1))), r"parameter 'heads\.a\.bias'"),
        (lambda net: setattr(net, "extra", nn.Linear(2, 2)), "submodule 'extra' was added"),
    ):
        with Job() as job:
            job.step()
            change(job.raw)
            with pytest.raises(muster.InvalidArgument, match=match):
                job.strategy.step(lambda x: loss_of(job.model, x), X)


def test_items_of_a_prepared_module_are_those_of_all_replicas() -> None:
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        raw = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 1)}), nn.Linear(4, 1))
        model, _ = strategy.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        model[1]["a"] = model[1]["a"]
        assert strategy.step(lambda x: model[2](model[0](x)).mean(), X).stepped
        del model[1]["a"]
        with pytest.raises(muster.InvalidArgument, match=r"submodule '1\.a' was replaced"):
            strategy.step(lambda x: model[2](model[0](x)).mean(), X)
        model[0] = nn.Linear(4, 4)
        with pytest.raises(muster.InvalidArgument, match="submodule '0' was replaced"):
            strategy.step(lambda x: model[2](model[0](x)).mean(), X)


@pytest.mark.parametrize("how", ["before", "raw", "prepared", "part", "view"])
def test_every_replica_is_compiled(how: str) -> None:
    torch._dynamo.reset()
    compiled = set()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:  # a replica that comes late runs what another one has compiled
            compiled.add(threading.get_ident())
            return graph.forward(*given)

        return run

    def make() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)))
        if how == "before":
            model[1].compile(backend=backend)
        return model

    strategy = muster.MirroredStrategy(["cpu"] * 2)
    raw = make()
    model, _ = strategy.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    call = model
    if how == "raw":
        raw.compile(backend=backend, fullgraph=True)
    elif how == "prepared":
        model.compile(backend=backend)
    elif how == "part":
        raw[1].compile(backend=backend, fullgraph=True)
    elif how == "view":
        part = torch.compile(model[1], backend=backend)
        call = lambda x: part(model[0](x))  # noqa: E731
    for _ in range(2):
        assert strategy.step(lambda x: call(x).square().mean(), X).stepped
    assert compiled == {thread.ident for thread in strategy._threads.threads}
    strategy.close()


def test_one_replica_is_the_module_itself() -> None:
    with muster.MirroredStrategy(["cpu"]) as strategy:
        raw = build()
        model = strategy.prepare(raw)
        assert model.body is raw.body and model.body[0] is raw.body[0] and model.training_step == raw.training_step
        assert raw._compiled_call_impl is None and not raw._forward_pre_hooks


class Momentum(nn.Module):
    """Forward lets a second encoder follow the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
        self.writes: str | None = "counted"

    def forward(self, x: Tensor) -> Tensor:
        if self.writes == "counted":
            with torch.no_grad():
                self.second.weight.mul_(0.9).add_(self.first.weight, alpha=0.1)
        elif self.writes == "through data":
            self.second.weight.data.mul_(0.9).add_(self.first.weight.data, alpha=0.1)
        return self.first(x) - self.second(x)


@pytest.mark.parametrize("writes", ["counted", "through data"])
def test_a_parameter_that_replicas_of_one_memory_write_in_a_step_is_an_error(writes: str) -> None:
    module = Momentum()
    module.writes = writes
    x = torch.ones(4, 3)
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.first.parameters(), lr=0.1))
        with pytest.raises(muster.InvalidArgument, match=r"'second\.weight' was written in the step.*2 replicas"):
            strategy.step(lambda x: model(x).square().mean(), x)
        with pytest.raises(muster.InvalidArgument, match=r"'second\.weight' was written in run\(\).*2 replicas"):
            strategy.run(model, x)
        model.writes = None
        strategy.run(model, x)
        before = module.first.weight.detach().clone()
        strategy.step(lambda x: model(x).square().mean(), x)
        assert not torch.equal(module.first.weight, before)
    with muster.MirroredStrategy(["cpu"]) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.first.parameters(), lr=0.1))
        model.writes = writes
        strategy.step(lambda x: model(x).square().mean(), x)
        strategy.run(model, x)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_forward_renormalises_are_no_error(kind: Any) -> None:
    module = kind(8, 4, max_norm=0.5)
    with muster.MirroredStrategy(["cpu"] * 2) as strategy:
        model, _ = strategy.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for _ in range(2):
            strategy.step(lambda ids: model(ids).square().mean(), torch.arange(8).view(4, 2))
