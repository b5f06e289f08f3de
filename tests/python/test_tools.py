"""Tools around models, used as on any module, on what a strategy or DistributedDataParallel has prepared: each program
does what it does in one process without Muster, on whole batches."""

from __future__ import annotations

import copy
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
import transformers
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.nn.utils import parametrizations, parametrize
from torch.optim import swa_utils
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import muster
from support.jobs import WorkerPool, make_job, part_of, plain

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(quantiz|jit|reduce_range|CUDA is not available|Optimizer|lr_scheduler)"
)
ROWS = 8


# --- ways to train ----------------------------------------------------------------------------------------------------
class Alone:
    """Without Muster."""

    rank = 0
    replicas_here = 1
    steps_flat = False
    """Whether the optimizer's step() is not called."""

    def prepare(self, *objects: Any) -> Any:
        return objects if len(objects) > 1 else objects[0]

    def load(self, data: TensorDataset) -> Any:
        return StatefulDataLoader(data, batch_size=ROWS)

    def step(self, optimizer: Any, loss_of: Callable[..., Tensor], *batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(*batch).backward()
        optimizer.step()

    def divide(self, batch: Any) -> Any:
        """Of a whole batch, what the step takes."""
        return batch

    def raw(self, model: Any) -> nn.Module:
        """As users of this way write it."""
        return model  # type: ignore[no-any-return]

    def module(self, model: Any) -> Any:
        """What has the methods of the user's class."""
        return model

    def outputs(self, model: Any, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Of a batch: for a metric of this process."""
        return model(x), y


class UnderStrategy(Alone):
    def __init__(self, strategy: muster.Strategy) -> None:
        self.strategy = strategy
        self.rank = strategy.rank
        self.replicas_here = len(strategy.devices)
        self.steps_flat = True

    def prepare(self, *objects: Any) -> Any:
        return self.strategy.prepare(*objects)

    def load(self, data: TensorDataset) -> Any:
        return self.strategy.prepare(super().load(data))

    def step(self, optimizer: Any, loss_of: Callable[..., Tensor], *batch: Any) -> None:
        assert self.strategy.step(loss_of, *batch, optimizers=optimizer).stepped

    def divide(self, batch: Any) -> Any:
        return part_of(self.strategy, batch)

    def raw(self, model: Any) -> nn.Module:
        return model.module  # type: ignore[no-any-return]

    def outputs(self, model: Any, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        return self.strategy.gather(self.strategy.run(lambda x, y: (model(x), y), x, y))  # type: ignore[no-any-return]


class UnderDDP(Alone):
    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def prepare(self, *objects: Any) -> Any:
        prepared = [
            muster.DistributedDataParallel(given) if isinstance(given, nn.Module) else given for given in objects
        ]
        return prepared if len(prepared) > 1 else prepared[0]

    def load(self, data: TensorDataset) -> Any:
        return StatefulDataLoader(data, ROWS // 2, sampler=DistributedSampler(data, shuffle=False))

    def divide(self, batch: Any) -> Any:
        return tuple(tensor.chunk(2)[self.rank] for tensor in batch)

    def raw(self, model: Any) -> nn.Module:
        return model.module  # type: ignore[no-any-return]

    def module(self, model: Any) -> Any:
        return model.module


# --- what programs use ------------------------------------------------------------------------------------------------
def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 2, generator=generator)


X = batch(99)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]


def built(make: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return make()


def ready(way: Alone, module: nn.Module, lr: float = 0.01) -> tuple[Any, Any]:
    model, optimizer = way.prepare(module, torch.optim.AdamW(module.parameters(), lr=lr))
    return model, optimizer


def train(way: Alone, called: Any, optimizer: Any, numbers: range = range(3)) -> None:
    for number in numbers:
        way.step(optimizer, lambda x, y: F.mse_loss(called(x), y), *way.divide(batch(number)))


def named(state: dict[str, Any]) -> dict[str, Any]:
    """Without the names of wrappers."""
    return {name.replace("_orig_mod.", "").replace("module.", ""): value for name, value in state.items()}


Program = Callable[[Any, Path], Any]
PROGRAMS: dict[str, Program] = {}


def program(fn: Program) -> Program:
    """A program returns what is to be equal; the folder is its own."""
    PROGRAMS[fn.__name__] = fn
    return fn


# --- programs ---------------------------------------------------------------------------------------------------------
@program
def export(way: Alone, folder: Path) -> Any:
    model, optimizer = ready(way, built())
    train(way, model, optimizer)
    exported = torch.export.export(way.raw(model), (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(exported, folder / "model.pt2")
    of_prepared = torch.export.export(way.module(model), (X,))
    train(way, model, optimizer, range(3, 5))
    loaded = torch.export.load(folder / "model.pt2")
    return loaded.module()(X), exported.module()(X[:3]), of_prepared.module()(X), model(X)


@program
def trace(way: Alone, folder: Path) -> Any:
    model, optimizer = ready(way, built())
    train(way, model, optimizer)
    raw, parameters = way.raw(model), dict(way.raw(model).named_parameters())

    def sum_of(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(raw, parameters, (x,)).sum()

    return (
        torch.jit.script(raw)(X),
        torch.jit.trace(raw, (X,))(X),
        torch.fx.symbolic_trace(raw)(X),
        torch.func.vmap(torch.func.grad(sum_of), (None, 0))(parameters, X),
    )


@program
def compile_(way: Alone, folder: Path) -> Any:
    results: list[Any] = []

    def compiled(model: Any) -> Any:
        return torch.compile(model, backend="eager")

    def before() -> None:
        module = compiled(built())
        model, optimizer = ready(way, module)
        train(way, model, optimizer)
        results.extend([model(X), named(model.state_dict())])

    def after() -> None:
        model, optimizer = ready(way, built())
        whole = torch.compile(model, backend="eager", fullgraph=not isinstance(way, UnderDDP))
        train(way, whole, optimizer)
        with torch.no_grad():
            results.extend([whole(X), named(whole.state_dict())])

    def in_place() -> None:
        module = built()
        module.first.compile(backend="eager")
        model, optimizer = ready(way, module)
        train(way, model, optimizer, range(2))
        model.compile(backend="eager")
        train(way, model, optimizer, range(2, 4))
        results.append(model(X))

    def the_loss() -> None:
        model, optimizer = ready(way, built())
        loss_of = compiled(lambda x, y: F.mse_loss(model(x), y))
        for number in range(3):
            way.step(optimizer, loss_of, *way.divide(batch(number)))
        results.append(model(X))

    for each in (before, after, in_place, the_loss):
        each()
    return results


@program
def save(way: Alone, folder: Path) -> Any:
    model, optimizer = ready(way, built())
    train(way, model, optimizer)
    results = []
    for value in (way.raw(model), copy.deepcopy(way.raw(model)), way.module(model)):
        torch.save(value, folder / "model.pt")
        assert b"muster" not in (folder / "model.pt").read_bytes()
        loaded = torch.load(folder / "model.pt", weights_only=False)
        assert type(loaded) is Net
        loaded(X).sum().backward()
        results.append(loaded(X))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    state = torch.load(folder / "state.pt")
    train(way, model, optimizer)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(way, model, optimizer)
    return results, named(state["model"]), model(X)


class Quantized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.last(self.relu(self.first(self.quant(x)))))  # type: ignore[no-any-return]


def eager_mode() -> Any:
    module = built(Quantized).train()
    module.qconfig = quantization.get_default_qat_qconfig("x86")
    quantization.fuse_modules_qat(module, [["first", "relu"]], inplace=True)
    return quantization.prepare_qat(module)


def graph_mode() -> Any:
    return quantize_fx.prepare_qat_fx(built().train(), quantization.get_default_qat_qconfig_mapping("x86"), (X,))


ROUNDED = "rounded to int8"
"""Results that are another of few values where a parameter lies at a boundary, and parameters differ by rounding."""


@program
def qat(way: Alone, folder: Path) -> Any:
    results: list[Any] = []
    rounded: list[Tensor] = []
    for module, convert in ((eager_mode(), quantization.convert), (graph_mode(), quantize_fx.convert_fx)):
        model, optimizer = way.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))

        def train_alike(model: Any = model, optimizer: Any = optimizer) -> None:
            for number in range(2):  # parts of the same rows, and so of the same ranges
                x, y = (half.repeat(2, 1) for half in (values[: ROWS // 2] for values in batch(number)))
                way.step(optimizer, lambda x, y: F.mse_loss(model(x), y), *way.divide((x, y)))

        train_alike()
        model.apply(quantization.disable_observer)
        train_alike()
        raw = way.raw(model)
        ranges = {
            name: buffer for name, buffer in raw.named_buffers() if name.endswith(("min_val", "max_val", "scale"))
        }
        assert ranges
        results.append(ranges)
        results.append({name: parameter.detach().clone() for name, parameter in raw.named_parameters()})
        rounded.append(convert(copy.deepcopy(raw).eval())(X))
    return {"results": results, ROUNDED: rounded}


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def parametrized() -> nn.Module:
    module = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 16)),
        nn.Linear(16, 16),
        parametrizations.spectral_norm(nn.Linear(16, 16)),
        parametrizations.orthogonal(nn.Linear(16, 2)),
    )
    parametrize.register_parametrization(module[1], "weight", Symmetric())
    return module


@program
def parametrize_(way: Alone, folder: Path) -> Any:
    model, optimizer = ready(way, built(parametrized))
    together = threading.Barrier(way.replicas_here)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            together.wait(60)
            loss = F.mse_loss(model(x), y) + F.mse_loss(model(x + 1), y)
            together.wait(60)
            return loss

    for number in range(3):
        way.step(optimizer, loss_of, *way.divide(batch(number)))
    evaluated = model.eval()(X).detach()
    raw: Any = way.raw(model)
    for layer in raw:
        parametrize.remove_parametrizations(layer, "weight")
    return evaluated, raw(X), raw.state_dict()


@program
def swa(way: Alone, folder: Path) -> Any:
    model, optimizer = ready(way, built(lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))))
    way.raw(model).eval()  # several replicas normalise each by its own part
    averaged = swa_utils.AveragedModel(model)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    rates = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for number in range(4):
        train(way, model, optimizer, range(number, number + 1))
        averaged.update_parameters(model)
        ema.update_parameters(model)
        rates.step()
    swa_utils.update_bn([batch(number) for number in range(3)], averaged)
    result = averaged.eval()(X), named(averaged.module.state_dict()), ema(X), optimizer.param_groups[0]["lr"]
    way.module(model).load_state_dict(named(averaged.module.state_dict()))
    train(way, model, optimizer)
    return result, model(X)


@program
def swa_of_norms_that_synchronise(way: Alone, folder: Path) -> Any:
    """torch's nn.SyncBatchNorm refuses tensors of the CPU where there is a process group, in an average too."""
    kind = nn.BatchNorm1d if isinstance(way, UnderDDP) else nn.SyncBatchNorm  # which torch's wrapper refuses, too
    model, optimizer = ready(way, built(lambda: nn.Sequential(nn.Linear(6, 16), kind(16), nn.Linear(16, 2))))
    way.raw(model).eval()
    averaged = swa_utils.AveragedModel(model)
    for number in range(2):
        train(way, model, optimizer, range(number, number + 1))
        averaged.update_parameters(model)
    for norm in averaged.modules():
        if isinstance(norm, nn.SyncBatchNorm):
            norm.__class__ = nn.BatchNorm1d
    swa_utils.update_bn([batch(number) for number in range(3)], averaged)
    return averaged.eval()(X), named(averaged.module.state_dict())


@program
def metrics(way: Alone, folder: Path) -> Any:
    model, _ = ready(way, built())
    data = TensorDataset(*(torch.cat(column) for column in zip(*map(batch, range(3)), strict=True)))
    syncs = {"sync_on_compute": not isinstance(way, UnderStrategy)}
    kinds = (torchmetrics.MeanSquaredError(**syncs), torchmetrics.SpearmanCorrCoef(2, **syncs))
    collection = torchmetrics.MetricCollection(list(kinds))
    own = torchmetrics.MeanSquaredError()
    with torch.no_grad():
        for x, y in way.load(data):
            collection.update(*way.outputs(model, x, y))
            if way.replicas_here == 1:  # of this process's part
                x, y = (values[0] if isinstance(values, muster.PerReplica) else values for values in (x, y))
                own.update(model(x), y)
    return collection.compute(), own.compute() if way.replicas_here == 1 else collection["MeanSquaredError"].compute()


@program
def stateful_data_loader(way: Alone, folder: Path) -> Any:
    data = TensorDataset(*(torch.cat(column) for column in zip(*map(batch, range(5)), strict=True)))
    model, optimizer = ready(way, built())

    def train_on(loader: Any) -> Iterator[None]:
        for x, y in loader:
            way.step(optimizer, lambda x, y: F.mse_loss(model(x), y), x, y)
            yield

    loader = way.load(data)
    steps = train_on(loader)
    for _ in range(2):
        next(steps)
    torch.save(loader.state_dict(), folder / "loader.pt")
    steps.close()
    again = way.load(data)
    again.load_state_dict(torch.load(folder / "loader.pt", weights_only=False))
    remaining = len(list(train_on(again)))
    return remaining, model(X)


def tokens(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(40, (ROWS, 7), generator=generator), torch.randint(3, (ROWS,), generator=generator)


def with_lora() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=3, **sizes, **none)
    model = built(lambda: transformers.BertForSequenceClassification(config))
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    return peft.get_peft_model(model, lora)


@program
def lora(way: Alone, folder: Path) -> Any:
    module = with_lora()
    module.add_adapter("second", peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    model, optimizer = ready(way, module)
    methods = way.module(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return model(input_ids=x, labels=y).loss  # type: ignore[no-any-return]

    def apart(x: Tensor, y: Tensor) -> Tensor:
        with methods.disable_adapter(), torch.no_grad():
            before = methods(input_ids=x).logits
        return F.mse_loss(model(input_ids=x).logits, before + 1)

    for number, (adapter, loss) in enumerate([("default", loss_of), ("second", loss_of), ("default", apart)]):
        methods.set_adapter(adapter)
        for of in range(2 * number, 2 * number + 2):
            way.step(optimizer, loss, *way.divide(tokens(of)))
    ids = tokens(9)[0]
    trained = model(input_ids=ids).logits
    with methods.disable_adapter():
        without = methods(input_ids=ids).logits
    methods.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(with_lora().unload(), folder)
    assert isinstance(methods, peft.PeftModel)
    state = peft.get_peft_model_state_dict(methods)
    merged = copy.deepcopy(way.raw(model)).merge_and_unload()
    logits = [each.eval()(input_ids=ids).logits for each in (loaded, merged)]
    return trained, without, logits, state, methods.get_nb_trainable_parameters()


@program
def profiler(way: Alone, folder: Path) -> Any:
    model, optimizer = ready(way, built())
    found: list[dict[str, float]] = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with record_function("forward"):
            output = model(x)
        return F.mse_loss(output, y)

    def look(of: Any) -> None:
        counts = {event.key: event.count for event in of.key_averages()}
        of_replicas = ("forward", "aten::linear", "autograd::engine::evaluate_function: AddmmBackward0")
        found.append({name: counts.get(name, 0) / way.replicas_here for name in of_replicas})
        assert way.steps_flat or "Optimizer.step#AdamW.step" in counts
        of.export_chrome_trace(str(folder / "trace.json"))

    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True, on_trace_ready=look) as during:
        for number in range(5):
            way.step(optimizer, loss_of, *way.divide(batch(number)))
            during.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as whole:
        way.step(optimizer, loss_of, *way.divide(batch(5)))
    look(whole)
    return found


# --- the tests --------------------------------------------------------------------------------------------------------
def run(way: Alone, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return PROGRAMS[name](way, Path(folder))


def under_strategy(strategy: muster.Strategy, name: str) -> Any:
    return run(UnderStrategy(strategy), name)


def under_ddp(name: str) -> Any:
    dist.init_process_group("gloo")
    try:
        result = plain(run(UnderDDP(), name))
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


@functools.cache
def alone(name: str) -> Any:
    return plain(run(Alone(), name))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", ["mirrored-2", "workers-2", "ddp"])
def test_the_tool_works(kind: str, name: str, two_workers: WorkerPool) -> None:
    expected = alone(name)
    results = (
        two_workers.call(under_ddp, name, timeout=240)
        if kind == "ddp"
        else make_job(kind, two_workers)(under_strategy, name)
    )
    for result in results:
        ours, theirs = (dict(r) if isinstance(r, dict) else {"results": r} for r in (result, expected))
        torch.testing.assert_close(ours.pop(ROUNDED, None), theirs.pop(ROUNDED, None), rtol=0, atol=5e-2)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
