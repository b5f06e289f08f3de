"""Lightning's Trainer and Fabric with Muster's strategies do what they do with Lightning's own."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import muster.lightning
from muster import attributes
from muster.lightning.workers import Job
from support.jobs import WorkerPool, plain
from support.scripts import output_of
from support.servers import Servers

ROOT = Path(__file__).resolve().parents[2]

# --- modules ----------------------------------------------------------------------------------------------------------


class Points(pl.LightningDataModule):
    """Points, and on which side of a plane they lie; 21 of them, so that ranks' batches are uneven."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(21, 6, generator=generator)
        self.data = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)

    def predict_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        # torch's AdamW squares in the parameters' type, where float16 has no such small numbers.
        is_half = self.dtype == torch.float16
        optimizer = (
            torch.optim.SGD(self.parameters(), lr=0.1) if is_half else torch.optim.AdamW(self.parameters(), lr=1e-2)
        )
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Descending(Classifier):
    """With steps in proportion to gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Alternating(Classifier):
    """Two optimizers by hand, each over a half of the net; the other half may be frozen meanwhile."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, 0.1)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.Adam(self.net[2].parameters())


class Accumulating(Classifier):
    """Two micro-batches an update, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, ends = self.optimizers(), batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=ends):
            self.manual_backward(self.loss(batch) / 2)
            if ends:
                optimizer.step()
                optimizer.zero_grad()


class Hooks(Callback):
    """What callbacks see, in their order."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {"loss": [], "norm": [], "step": []}

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.seen["loss"].append(float(loss))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen["norm"].append(float(nn.utils.get_total_norm(p.grad for p in module.parameters())))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["step"].append((trainer.global_step, len(batch[0]), trainer.optimizers[0].param_groups[0]["lr"]))


class Losses(Callback):
    """What training_step gave, as other callbacks get it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


# --- fitting ----------------------------------------------------------------------------------------------------------


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(strategy: Any, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", strategy=strategy, **{"max_epochs": 2, **QUIET, **arguments})


def fitted(
    module: pl.LightningModule, strategy: Any, fit: dict[str, Any] | None = None, sees: bool = True, **arguments: Any
) -> Any:
    """Parameters, what was logged, and what callbacks saw (where one `sees`), after training with a strategy."""
    torch.manual_seed(1)
    hooks, losses = Hooks(), Losses()
    if module.automatic_optimization:
        arguments["callbacks"] = [*arguments.get("callbacks", []), losses, *([hooks] if sees else [])]
    run = trainer(strategy, **arguments)
    run.fit(module, datamodule=Points(), **(fit or {}))
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    return plain(
        {
            "parameters": {
                name: value.float() if value.element_size() == 2 else value
                for name, value in module.state_dict().items()
            },
            "logged": logged,
            "seen": hooks.seen,
            "losses": losses.seen,
            "steps": run.global_step,
        }
    )


def assert_same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def tolerance(variant: str) -> float:
    """What other orders of adding, and other optimizers, may differ by."""
    return 1e-2 if "16" in variant else 1e-6


VARIANTS: dict[str, Any] = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed", "max_epochs": 1},
    "bf16-true": {"precision": "bf16-true", "max_epochs": 1, "limit_train_batches": 2},
    "16-true": {"precision": "16-true", "max_epochs": 1, "limit_train_batches": 2},
    "fp64": {"precision": "64-true", "max_epochs": 1},
    "clipped by norm": {"gradient_clip_val": 0.1, "max_epochs": 1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_epochs": 1},
    "accumulated": {"accumulate_grad_batches": 2, "val_check_interval": 1},
}

# --- a process a rank -------------------------------------------------------------------------------------------------


@contextmanager
def launched() -> Iterator[None]:
    """As by torchrun, with the variables that a job's processes have."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            del os.environ["TORCHELASTIC_RUN_ID"]
            if dist.is_initialized():
                dist.destroy_process_group()


def fit_as_ranks() -> None:
    with launched():
        for name, arguments in VARIANTS.items():
            ours, theirs = (fitted(Classifier(), s, devices=2, **arguments) for s in ("muster_ddp", "ddp"))
            assert ours["steps"] > 0, name
            assert_same(ours, theirs)
        # Where halves are frozen in turn, torch's wrapper raises.
        theirs = fitted(Alternating(False), "ddp", devices=2)
        assert_same(fitted(Alternating(False), "muster_ddp", devices=2), theirs)
        assert_same(fitted(Alternating(True), "muster_ddp", devices=2), theirs)
        theirs = fitted(Accumulating(), "ddp", devices=2)
        for strategy in ("muster_ddp", muster.lightning.DDPStrategy(static_graph=True)):
            assert_same(fitted(Accumulating(), strategy, devices=2), theirs)


def test_ranks_train_as_with_lightnings_ddp(two_workers: WorkerPool) -> None:
    two_workers.call(fit_as_ranks, timeout=200)


def stopped_and_resumed(strategy: Any, folder: str, checkpoint: str | None = None, **arguments: Any) -> Any:
    """Early stopping ends the first training; the second one goes on from its checkpoint, or another one."""
    saving = ModelCheckpoint(folder, filename="best", monitor="val", save_last=True)
    early = EarlyStopping("val", patience=0, min_delta=1e9)
    first = fitted(
        Classifier(), strategy, callbacks=[saving, early], enable_checkpointing=True, max_epochs=5, **arguments
    )
    second = fitted(
        Classifier(), strategy, {"ckpt_path": checkpoint or f"{folder}/last.ckpt"}, max_epochs=3, **arguments
    )
    return {"first": first, "second": second, "best": saving.best_model_score.item()}


def resume_as_ranks(folder: str) -> None:
    with launched():
        theirs = stopped_and_resumed("ddp", f"{folder}/theirs", devices=2)
        assert theirs["first"]["steps"] == 6  # of two epochs
        assert theirs["second"]["steps"] == 9
        ours = stopped_and_resumed("muster_ddp", f"{folder}/ours", f"{folder}/theirs/last.ckpt", devices=2)
        assert_same(ours, theirs)


def test_ranks_go_on_from_lightnings_checkpoints(two_workers: WorkerPool, tmp_path: Path) -> None:
    two_workers.call(resume_as_ranks, str(tmp_path), timeout=200)


def looped(strategy: str, **arguments: Any) -> Any:
    """A loop of Fabric's."""
    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, **arguments)
    fabric.launch()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(Points().data, batch_size=2, shuffle=True))
    for number, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(F.cross_entropy(model(x), y))
        if number % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(fabric.strategy, muster.lightning.FabricDDPStrategy) == (strategy == "muster_ddp")
    return plain(module.state_dict())


def loop_as_ranks() -> None:
    with launched():
        for arguments in ({}, {"precision": "bf16-mixed"}):
            assert_same(*(looped(strategy, devices=2, **arguments) for strategy in ("muster_ddp", "ddp")))


def test_ranks_of_fabric_do_as_with_lightnings_ddp(two_workers: WorkerPool) -> None:
    two_workers.call(loop_as_ranks, timeout=200)


# --- replicas of one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_replicas_train_as_a_single_device(variant: str) -> None:
    ours = fitted(Classifier(), "muster_mirrored", devices=2, **VARIANTS[variant])
    theirs = fitted(Classifier(), "auto", devices=1, **VARIANTS[variant])
    assert ours["steps"] > 0
    assert_same(ours, theirs, tolerance(variant))


def test_one_replica_trains_as_a_single_device_to_the_last_bit() -> None:
    ours = fitted(Classifier(), muster.lightning.MirroredStrategy(), devices=1)
    assert_same(ours, fitted(Classifier(), "auto", devices=1))


def test_replicas_stop_and_go_on_as_a_single_device(tmp_path: Path) -> None:
    theirs = stopped_and_resumed("auto", str(tmp_path / "theirs"), devices=1)
    ours = stopped_and_resumed("muster_mirrored", str(tmp_path / "ours"), devices=3)
    assert theirs["second"]["steps"] > theirs["first"]["steps"]
    assert_same(ours, theirs, 1e-6)


class Normalised(Classifier):
    """With a hook that must see a gradient once, an optimizer that calls a closure, and more in its logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(2))
        self.net[0].weight.register_hook(lambda gradient: gradient * 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net(x)
        right = (logits.argmax(1) == y).sum()
        self.log_dict({"right": right, "highest": logits.max()}, reduce_fx="max")
        self.log("size", len(x), reduce_fx="sum")
        self.log("accuracy", right / len(x), batch_size=len(x))
        return {"loss": F.cross_entropy(logits, y), "right": right}

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class Weighed(Classifier):
    """Logs with the usual number of samples of a batch, as many modules do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("weighed", loss, on_step=False, on_epoch=True, batch_size=4)
        return loss


def test_replicas_may_log_with_one_size_of_a_batch() -> None:
    ours = fitted(Weighed(), "muster_mirrored", devices=3)  # of 2, 1 and 1 samples
    assert_same(ours, fitted(Weighed(), "auto", devices=1), 1e-6)


class Sums(Callback):
    """Collects what training_step returned."""

    def __init__(self) -> None:
        self.right: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        right = outputs["right"]
        self.right.append(sum(map(int, right)) if isinstance(right, muster.PerReplica) else int(right))


def test_replicas_normalise_log_and_return_together() -> None:
    both = []
    for strategy, devices in (("muster_mirrored", 2), ("auto", 1)):
        sums = Sums()
        module = Normalised()
        found = fitted(module, strategy, devices=devices, sees=False, callbacks=[sums], sync_batchnorm=devices == 2,
                       limit_train_batches=4)  # fmt: skip
        # The most of a part's is not the most of the batch.
        del found["logged"]["right"]
        both.append({**found, "right": sums.right})
        assert not isinstance(module.net[3], nn.SyncBatchNorm)
    assert_same(*both, 1e-4)


class Meter:
    count = 0
    lock: Any = None
    problem: str | None = None


class Shared(Meter):
    """One object for all replicas."""

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Odd(Classifier):
    """Does in training_step what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.seen: list[int] = []
        self._private: list[int] = []
        self.nested: dict[str, Any] = {"seen": []}
        self.total = torch.zeros(())
        self.meter = Meter()
        self.shared = Shared()
        self.child = nn.ReLU()
        self.child.seen = []
        self.lock = threading.Lock()
        self.meter.lock = self.lock
        self.config = Meter()
        self.config.problem = None
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.accuracy = MulticlassAccuracy(2)
        self.automatic_optimization = kind != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        is_first = batch[0][0, 0] == Points().data.tensors[0][batch_idx * 4, 0]
        loss = self.loss(batch)
        if self.kind == "list":
            self.seen.append(len(batch[0]))
        elif self.kind == "private list":
            self._private.append(len(batch[0]))
        elif self.kind == "nested":
            self.nested["seen"].append(len(batch[0]))
        elif self.kind == "nested key":
            self.nested.setdefault(batch_idx, 1)
        elif self.kind == "second part" and not is_first:
            self.seen.append(len(batch[0]))
        elif self.kind == "tensor in place":
            self.total += len(batch[0])
        elif self.kind == "object":
            self.meter.count += len(batch[0])
        elif self.kind == "setting":
            self.config.problem = "one label"
        elif self.kind == "setting of a part":
            self.config.problem = f"from {is_first}"
        elif self.kind == "lock":
            with self.lock:
                assert self.meter.lock is self.lock
        elif self.kind == "submodule":
            self.child.seen.append(len(batch[0]))
        elif self.kind == "teacher":
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.lerp_(other.detach() + 1, 0.1)
        elif self.kind == "teacher's data":
            for own, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                own.data.mul_(0.9).add_(other.data + 1, alpha=0.1)
        elif self.kind == "count":
            self.count += is_first
        elif self.kind == "logger":
            self.logger_of_module.info("seen")
            self.shared.count += 1
            assert self.hparams == {}
        elif self.kind == "metric":
            self.accuracy(self.net(batch[0]), batch[1])
        elif self.kind == "logged metric":
            self.log("accuracy", self.accuracy)
        elif self.kind == "names":
            self.log(f"from {is_first}", loss)
        elif self.kind == "function":
            self.log("loss", loss, reduce_fx=torch.median)
        elif self.kind == "attribute":
            self.last = loss.detach()
        elif self.kind == "infinite":
            return loss * float("inf")
        elif self.kind == "half, in a collective":
            if is_first:
                return None
            self.trainer.strategy.muster.gather(loss.reshape(1))
        elif self.kind == "raises" and not is_first:
            raise KeyError("of the user's")
        elif self.kind == "interrupted" and not is_first:
            raise KeyboardInterrupt
        elif self.kind == "gather":
            self.all_gather(loss)
        elif self.kind == "shape":
            return self.net(batch[0])
        elif (self.kind == "half" and is_first) or self.kind == "none":
            return None
        return loss

    def configure_optimizers(self) -> Any:
        return None if self.kind == "no optimizer" else super().configure_optimizers()


REFUSED = {
    "manual": "use strategy='muster_ddp'",
    "list": r"wrote to self\.seen.*on_train_batch_end",
    "private list": r"wrote to self\._private",
    "nested": r"wrote to self\.nested",
    "nested key": r"wrote to self\.nested",
    "second part": r"wrote to self\.seen",
    "tensor in place": r"wrote to self\.total",
    "object": r"wrote to self\.meter",
    "setting of a part": r"wrote to self\.config",
    "submodule": r"wrote to self\.child\.seen",
    "teacher": r"wrote the parameter 'teacher\.0\.weight'.*on_train_batch_end",
    "teacher's data": r"wrote the parameter 'teacher\.0\.weight'",
    "metric": "updated the metric 'accuracy'.*muster_ddp",
    "logged metric": "a metric of its own.*log a tensor instead",
    "names": "log the same names",
    "function": "use 'mean', 'sum', 'min' or 'max'",
    "infinite": "not finite.*detect_anomaly",
    "gather": r"strategy\.muster\.gather",
    "shape": "return the loss as a tensor of one element",
    "half, in a collective": "None on some replicas",
    "half": "None on some replicas.*return a loss that is 0",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_replicas_cannot_do_is_an_error_that_names_what_to_do(kind: str) -> None:
    module = Odd(kind)
    before = plain(module.state_dict())
    with pytest.raises(muster.Error, match=REFUSED[kind]):
        trainer("muster_mirrored", devices=2).fit(module, DataLoader(Points().data, batch_size=4))
    trained = {name: value for name, value in plain(module.state_dict()).items() if not name.startswith("teacher")}
    assert_same(trained, {name: before[name] for name in trained})


def test_replicas_of_several_devices_are_refused() -> None:
    strategy = muster.lightning.MirroredStrategy(parallel_devices=[torch.device("cpu", 0), torch.device("cpu", 1)])
    with pytest.raises(muster.InvalidArgument, match="use strategy='muster_ddp' for several GPUs"):
        trainer(strategy).fit(Classifier(), Points())


def test_replicas_of_several_nodes_are_refused() -> None:
    with pytest.raises(muster.InvalidArgument, match="in one process, and num_nodes is 2; use strategy='muster_ddp'"):
        trainer("muster_mirrored", devices=2, num_nodes=2)
    with pytest.raises(muster.InvalidArgument, match="num_nodes is 2"):
        lightning.Fabric(strategy="muster_mirrored", devices=2, num_nodes=2)


def test_replicas_of_a_compiled_module_are_refused() -> None:
    with pytest.raises(muster.InvalidArgument, match=r"self\.net\.compile\(\).*muster_ddp"):
        trainer("muster_mirrored", devices=2).fit(torch.compile(Classifier(), backend="eager"), Points())


def test_a_fit_that_fails_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer("muster_mirrored", devices=2, max_epochs=1).fit(Classifier(), Points())
    before = threading.active_count()

    class Misconfigured(Batched):
        def configure_optimizers(self) -> Any:
            raise KeyError("of the user's")

    module: Any = Misconfigured()
    with pytest.raises(KeyError, match="of the user's"):
        trainer("muster_mirrored", devices=2, sync_batchnorm=True).fit(module, Points())
    assert not isinstance(module.net[3], nn.SyncBatchNorm)

    module, run = Odd("raises"), trainer("muster_mirrored", devices=2, max_epochs=1)
    with pytest.raises(KeyError, match="of the user's"):
        run.fit(module, Points())
    with pytest.raises(muster.InvalidArgument, match="only while the Trainer fits"):
        _ = run.strategy.muster
    module.kind = "interrupted"
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            trainer("muster_mirrored", devices=2).fit(module, Points())
    finally:
        signal.signal(signal.SIGINT, handler)
    module.kind = "plain"
    run = trainer("muster_mirrored", devices=2, max_epochs=1)
    run.fit(module, Points())
    assert run.global_step == 6
    assert threading.active_count() == before

    def fail(strategy: Any) -> None:
        close(strategy)
        raise OSError("of closing")

    close = muster.MirroredStrategy.close
    monkeypatch.setattr(muster.MirroredStrategy, "close", fail)
    module = Batched()
    with pytest.raises(OSError, match="of closing"):
        trainer("muster_mirrored", devices=2, max_epochs=1, sync_batchnorm=True).fit(module, Points())
    assert not isinstance(module.net[3], nn.SyncBatchNorm)


class Employed(Classifier):
    def setup(self, stage: str) -> None:
        self.held = {"trainer": self.trainer, "fit": self.trainer.fit}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.trainer.global_step == batch_idx
        assert self.held["trainer"] is self.held["fit"].__self__ is self.trainer
        return super().training_step(batch, batch_idx)


class Contrasted(Descending):
    """Its loss is of all samples together: of the parts', of the ranks', or of one device's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        outputs = self.net(batch[0])
        if isinstance(strategy, muster.lightning.MirroredStrategy):
            outputs = strategy.muster.gather(outputs)
        elif self.trainer.world_size > 1:
            outputs = torch.cat([self.all_gather(outputs, sync_grads=is_own).flatten(0, 1) for is_own in (True, False)])
        return outputs.logsumexp(0).square().mean()


def test_replicas_may_compare_all_samples() -> None:
    ours = fitted(Contrasted(), "muster_mirrored", devices=2, limit_train_batches=5)
    assert_same(ours, fitted(Contrasted(), "auto", devices=1, limit_train_batches=5), 1e-5)


class Driver:
    pass


def test_what_drives_modules_is_one_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer("muster_mirrored", devices=2, max_epochs=1).fit(Employed(), Points())

    assert pl.Trainer in attributes.SHARED_TYPES
    monkeypatch.setattr(attributes, "SHARED_TYPES", [Driver])
    with muster.MirroredStrategy(["cpu", "cpu"]) as strategy:
        model = strategy.prepare(nn.Linear(2, 2))
        model.module.driver = driver = Driver()
        model.module.held = {"drivers": [driver], "meter": Meter()}
        model.module.held["meter"].driver = driver
        found = strategy.run(lambda: (model.driver, model.held["drivers"][0], model.held["meter"].driver))
        assert all(one is driver for of_replica in found for one in of_replica)
        assert len({id(meter) for meter in strategy.run(lambda: model.held["meter"])}) == 2


def test_replicas_may_skip_a_batch_and_write_what_nobody_counts() -> None:
    module = Odd("none")
    before = plain(module.state_dict())
    trainer("muster_mirrored", devices=2, max_epochs=1).fit(module, DataLoader(Points().data, batch_size=4))
    assert_same(plain(module.state_dict()), before)

    with pytest.warns(UserWarning, match=r"wrote self\.last: each replica has its own"):
        trainer("muster_mirrored", devices=2, max_epochs=1).fit(Odd("attribute"), Points())
    with pytest.warns(UserWarning, match=r"wrote the buffer 'count', each replica by its own part.*the largest"):
        trainer("muster_mirrored", devices=2, max_epochs=1).fit(Odd("count"), Points())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Odd("logger")
        module.logger_of_module = logging.getLogger("muster.tests")
        module.net = torch.compile(module.net, backend="eager")  # whose context counts
        trainer("muster_mirrored", devices=2, max_epochs=1, limit_val_batches=0).fit(module, Points())
    assert [warning for warning in caught if "training_step wrote" in str(warning.message)] == []


@pytest.mark.parametrize("kind", ["setting", "lock"])
def test_settings_that_all_replicas_make_and_what_cannot_be_copied_are_no_error(kind: str) -> None:
    module = Odd(kind)
    trainer("muster_mirrored", devices=2, max_epochs=1, limit_val_batches=0).fit(module, Points())
    assert module.config.problem == ("one label" if kind == "setting" else None)


class Sequences(Classifier):
    """Of batches that hold a sequence for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sequences, labels = zip(*batch, strict=True) if isinstance(batch[0], dict) else batch
        return F.cross_entropy(torch.stack([self.net(s).mean(0) for s in sequences]), torch.as_tensor(labels))


def by_sample(samples: Any) -> Any:
    return [torch.stack([x, -x, 2 * x]) for x, _ in samples], [{"label": int(y)} for _, y in samples]


def as_tuples(samples: Any) -> Any:
    return tuple(zip(*((torch.stack([x, -x, 2 * x]), int(y)) for x, y in samples), strict=True))


def as_dicts(samples: Any) -> Any:
    return [{"x": torch.stack([x, -x, 2 * x]), "label": int(y)} for x, y in samples]


@pytest.mark.parametrize("collate", [by_sample, as_tuples, as_dicts])
def test_batches_that_are_lists_of_samples_are_refused(collate: Any) -> None:
    loader = DataLoader(Points().data, batch_size=4, collate_fn=collate)
    with pytest.raises(muster.InvalidArgument, match=r"collate_fn.*muster_ddp"):
        trainer("muster_mirrored", devices=2).fit(Sequences(), loader)


class Uneven(IterableDataset):
    """Samples of which two workers give 3 and 7, so that a batch is short before the last one."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        x, y = Points().data[: 3 if worker.id == 0 else 7]
        return iter(zip(x, y, strict=True))


def tripled(samples: Any) -> Any:
    """Three rows for each sample."""
    return torch.cat([x.repeat(3, 1) for x, _ in samples]), torch.cat([y.repeat(3) for _, y in samples])


@pytest.mark.parametrize("kind", ["short before the last", "three rows a sample"])
def test_batches_of_as_many_fields_as_samples_are_divided(kind: str) -> None:
    results = []
    for strategy, devices in (("muster_mirrored", 2), ("auto", 1)):
        if kind == "three rows a sample":
            loader = DataLoader(Points().data, batch_size=2, collate_fn=tripled)
        else:
            loader = DataLoader(Uneven(), batch_size=2, num_workers=2)
        module = Descending()
        trainer(strategy, devices=devices, max_epochs=1).fit(module, loader)
        results.append(plain(module.state_dict()))
    assert_same(*results, 1e-5)


def as_list(samples: Any) -> Any:
    return [x for x, _ in samples]


def images(samples: Any) -> Any:
    """A list of images of one size, and one of what is in each."""
    return [x.expand(3, 4, 6) for x, _ in samples], [{"boxes": torch.zeros(3, 4)} for _ in samples]


@pytest.mark.parametrize("collate", [as_list, images, as_tuples])
def test_two_samples_of_one_size_are_refused(collate: Any) -> None:
    loader = DataLoader(Points().data, batch_size=2, collate_fn=collate)
    with pytest.raises(muster.InvalidArgument, match=r"of 2 items, one for each sample.*collate_fn"):
        trainer("muster_mirrored", devices=2).fit(Sequences(), loader)


class Foreign:
    """Another library's loader: what a DataLoader gives, without what it says of itself."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Points().data, batch_size=4))


class Measured(Foreign):
    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("loader", [Foreign, Measured])
def test_replicas_train_on_batches_of_a_loader_that_is_no_dataloader(loader: Any) -> None:
    results = []
    for strategy, devices in (("muster_mirrored", 2), ("auto", 1)):
        module, run = Descending(), trainer(strategy, devices=devices)
        run.fit(module, loader())
        assert run.global_step == 12
        results.append(plain(module.state_dict()))
    assert_same(*results, 1e-5)


class Shaped(Descending):
    """Logs values of `shape`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        for reduction in ("mean", "sum", "min", "max"):
            self.log(reduction, torch.full(self.shape, 2.0), reduce_fx=reduction, on_step=True, on_epoch=False)
        return loss


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_logged_value_may_have_dimensions_of_one(shape: Any) -> None:
    run = trainer("muster_mirrored", devices=2, max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    run.fit(Shaped(*shape), Points())
    assert {name: value.item() for name, value in run.callback_metrics.items()} == {
        "mean": 2.0,
        "sum": 4.0,
        "min": 2.0,
        "max": 2.0,
    }


@pytest.mark.parametrize("size", [2, 3])
def test_a_logged_value_of_several_elements_is_lightnings_error(size: int) -> None:
    with pytest.raises(ValueError, match="the tensor must have a single element"):
        trainer("muster_mirrored", devices=2).fit(Shaped(size), Points())


class OfTwo(Descending):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["a"]) + self.loss(batch["b"])


@pytest.mark.parametrize("size", [4, 3])
def test_several_loaders_have_batches_of_one_size(size: int) -> None:
    loaders = {"a": DataLoader(Points().data, batch_size=4), "b": DataLoader(Points().data, batch_size=size)}
    run = trainer("muster_mirrored", devices=2, max_epochs=1)
    if size == 4:
        run.fit(OfTwo(), loaders)
        assert run.global_step == 6
        return
    with pytest.raises(muster.InvalidArgument, match=r"2 loaders have \[4, 3\] samples.*one batch_size"):
        run.fit(OfTwo(), loaders)


class Tokens(Descending):
    """Logs a mean over tokens, of which a sample has three."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("tokens", loss, batch_size=3 * len(batch[0]), on_epoch=True)
        self.log("constant", loss, batch_size=4, on_epoch=True)
        return loss


def test_means_are_logged_by_the_sizes_of_parts_or_of_the_batch() -> None:
    ours, theirs = (
        fitted(Tokens(), strategy, devices=devices, max_epochs=1)["logged"]
        for strategy, devices in (("muster_mirrored", 2), ("auto", 1))
    )
    for name in ("tokens_epoch", "constant_epoch"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name


@contextmanager
def fabric_over(strategy: Any, **arguments: Any) -> Iterator[lightning.Fabric]:
    """A Fabric whose strategy ends with it."""
    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy, **arguments)
    try:
        yield fabric
    finally:
        fabric.strategy.teardown()


def stepped(strategy: Any, *, by_hand: bool = False, batch_size: int = 4, **arguments: Any) -> Any:
    """A loop of Fabric's over Muster's steps, or over backward and steps by hand."""
    with fabric_over(strategy, **arguments) as fabric:
        fabric.launch()
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
        model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters()))
        loader = fabric.setup_dataloaders(DataLoader(Points().data, batch_size=batch_size, drop_last=True))
        for x, y in loader:
            if by_hand:
                optimizer.zero_grad()
                fabric.backward(F.cross_entropy(model(x), y))
                optimizer.step()
            else:
                fabric.strategy.step(lambda x, y: F.cross_entropy(model(x), y), x, y, optimizers=optimizer)
        state = fabric.strategy.get_module_state_dict(model._forward_module)
        with torch.no_grad():
            outputs = model(Points().data.tensors[0])
        return plain({"parameters": state, "outputs": outputs})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_replicas_of_fabric_do_as_a_single_device(precision: Any) -> None:
    theirs = stepped("auto", devices=1, by_hand=True, precision=precision)
    for devices, by_hand in ((2, False), (1, True)):
        ours = stepped("muster_mirrored", devices=devices, by_hand=by_hand, precision=precision)
        assert_same(ours, theirs, tolerance("bf16" if precision == "bf16-mixed" else ""))
    with pytest.raises(muster.InvalidArgument, match=r"call strategy\.step"):
        stepped("muster_mirrored", devices=2, by_hand=True, precision=precision)


def test_what_replicas_of_fabric_cannot_do_is_an_error_that_names_what_to_do(tmp_path: Path) -> None:
    with fabric_over("muster_mirrored", devices=2) as fabric:
        batch = Points().data[:4]
        lit = fabric.setup(Classifier())
        with pytest.raises(muster.InvalidArgument, match="write a forward that does what they do"):
            lit.training_step(batch, 0)
        module = nn.Linear(6, 2)
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
        fabric.strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch)
        for meet, instead in ((fabric.all_gather, r"gather\(x\)"), (fabric.all_reduce, r"reduce\(x, 'sum'\)")):
            message = rf"{meet.__name__} is between.*fabric\.strategy\.muster\.{instead}"
            with pytest.raises(muster.InvalidArgument, match=message):
                fabric.strategy.step(lambda x, meet=meet: meet(model(x)).sum(), batch[0])
            with pytest.raises(muster.InvalidArgument, match=message):
                fabric.strategy.run(lambda x, meet=meet: meet(model(x)), batch[0])
            assert meet(torch.ones(2)).tolist() == [1.0, 1.0]
        with pytest.raises(muster.InvalidArgument, match="clip_norm"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        with pytest.raises(muster.InvalidArgument, match="was called after strategy"):
            optimizer.step()

        fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
        before = plain(module.state_dict())
        fabric.strategy.step(lambda x, y: F.cross_entropy(model(x), y), *batch)
        fabric.load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
        assert_same(plain(module.state_dict()), before)

    half = lightning.Fabric(accelerator="cpu", strategy="muster_mirrored", precision="bf16-true")
    with pytest.raises(muster.InvalidArgument, match="muster_options"):
        half.setup(nn.Linear(2, 2))


def test_a_replica_of_fabric_may_have_a_forward_of_its_own() -> None:
    module = nn.Linear(6, 2)
    whole = module.forward
    module.forward = lambda x: whole(x) * 2
    x = Points().data.tensors[0]
    with fabric_over("muster_mirrored", devices=1) as fabric, torch.no_grad():
        assert_same(fabric.setup(module)(x), whole(x) * 2)


def test_a_method_that_was_refused_leaves_forward_to_the_next_call() -> None:
    class Extended(nn.Linear):
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) * 2

    x = Points().data.tensors[0]
    with fabric_over("muster_mirrored", devices=2) as fabric, torch.no_grad():
        module = Extended(6, 2)
        expected = module(x)
        model = fabric.setup(module)
        model.mark_forward_method("twice")
        with pytest.raises(muster.InvalidArgument, match="cannot be called on every replica"):
            model.twice(x)
        assert_same(module(x), expected)
        assert_same(model(x), expected)


# --- servers ----------------------------------------------------------------------------------------------------------


def fit_all(strategy: str, **arguments: Any) -> Any:
    with launched():
        return {
            name: fitted(Classifier(), strategy, sees=False, **arguments, **more) for name, more in VARIANTS.items()
        }


def test_workers_of_servers_train_as_with_lightnings_ddp(two_workers: WorkerPool) -> None:
    ours = two_workers.call(fit_all, "muster_ps", timeout=200)
    theirs = two_workers.call(fit_all, "ddp", devices=2, timeout=200)
    for name in VARIANTS:
        for rank in (0, 1):
            assert_same(ours[rank][name], theirs[rank][name], tolerance(name))


class Measured(Classifier):
    """With a metric over all workers' samples, and values that workers exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(2, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        copied = copy.deepcopy(self.accuracy)
        assert copied.dist_sync_fn is self.accuracy.dist_sync_fn
        assert pickle.loads(pickle.dumps(copied)).dist_sync_fn is None
        ranks = self.all_gather(torch.tensor([self.global_rank]))
        strategy = self.trainer.strategy
        self.log("ranks", ranks.sum().float())
        self.log("most", strategy.reduce(torch.tensor(self.global_rank), reduce_op="max").float())
        self.log("mean", strategy.reduce(torch.tensor(float(self.global_rank))))
        self.log("all", float(strategy.reduce_boolean_decision(self.global_rank == 0)))
        self.log("any", float(strategy.reduce_boolean_decision(self.global_rank == 0, all=False)))
        self.log("from 1", float(strategy.broadcast({"rank": self.global_rank}, 1)["rank"]))
        strategy.barrier()


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class EndedEarly(Descending):
    """Ends its first epoch in the middle of a window of two micro-batches."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert len(optimizer.param_groups) == 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 0 and batch_idx == 1 else None


class Saving(Callback):
    """Saves after the first micro-batch of a window."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 0:
            trainer.save_checkpoint(self.path)


def resumed_in_a_window(strategy: Any, path: str, **arguments: Any) -> Any:
    fitted(Descending(), strategy, sees=False, max_epochs=1, accumulate_grad_batches=2, callbacks=[Saving(path)],
           **arguments)  # fmt: skip
    return fitted(Descending(), strategy, {"ckpt_path": path}, sees=False, max_epochs=1, accumulate_grad_batches=2,
                  **arguments)["parameters"]  # fmt: skip


class Clipped(Classifier):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


def fit_and_measure(strategy: str, folder: str, **arguments: Any) -> Any:
    with launched():
        contrasted = fitted(Contrasted(), strategy, sees=False, max_epochs=1, limit_train_batches=2, **arguments)
        ended = fitted(EndedEarly(), strategy, sees=False, accumulate_grad_batches=2, **arguments)
        in_window = resumed_in_a_window(strategy, f"{folder}/in_window", **arguments)
        taught = fitted(Odd("teacher"), strategy, sees=False, max_epochs=1, **arguments)
        averaging = {"swa": StochasticWeightAveraging(1e-2, swa_epoch_start=1), "ema": EMAWeightAveraging(decay=0.5)}
        averaged = {
            name: fitted(Classifier(), strategy, sees=False, callbacks=[callback], limit_val_batches=0, **arguments)
            for name, callback in averaging.items()
        }
        module = Measured()
        run = trainer(strategy, max_epochs=1, **arguments)
        run.fit(module, datamodule=Points())
        after_fit = {name: value.item() for name, value in run.callback_metrics.items()}
        (after_validate,) = run.validate(module, datamodule=Points(), verbose=False)
        predicted = run.predict(module, datamodule=Points())
        resumed = stopped_and_resumed(strategy, folder, sees=False, **arguments)
    return plain(
        {
            "fit": after_fit,
            "validate": after_validate,
            "predicted": predicted,
            "resumed": resumed,
            "contrasted": contrasted,
            "ended": ended,
            "in_window": in_window,
            "taught": taught,
            "averaged": averaged,
        }
    )


def test_workers_of_servers_measure_and_go_on_as_with_lightnings_ddp(two_workers: WorkerPool, tmp_path: Path) -> None:
    ours = two_workers.call(fit_and_measure, "muster_ps", str(tmp_path / "ours"), timeout=200)
    theirs = two_workers.call(fit_and_measure, "ddp", str(tmp_path / "theirs"), devices=2, timeout=200)
    assert theirs[0]["fit"]["from 1"] == 1
    assert theirs[0]["fit"]["mean"] == 0.5
    assert_same(ours, theirs, 1e-6)


def step_by_fabric(strategy: str, **arguments: Any) -> Any:
    with launched():
        return stepped(strategy, batch_size=2, **arguments)


def test_workers_of_servers_step_in_a_loop_of_fabric(two_workers: WorkerPool) -> None:
    ours = two_workers.call(step_by_fabric, "muster_ps", timeout=200)
    assert_same(ours, two_workers.call(step_by_fabric, "ddp", devices=2, by_hand=True, timeout=200), 1e-6)


class WithMetric(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)
        self.mean = MeanMetric()


def measure_by_fabric() -> list[float]:
    with launched():
        fabric = lightning.Fabric(accelerator="cpu", strategy="muster_ps")
        fabric.launch()
        modules = [WithMetric(), WithMetric()]
        for module in modules:
            fabric.strategy.setup_module(module)
            module.mean.update(float(fabric.global_rank))
        means = [float(module.mean.compute()) for module in modules]
        fabric.strategy.teardown()
        for module in modules:  # alone again
            module.mean.reset()
            module.mean.update(float(fabric.global_rank))
            means.append(float(module.mean.compute()) - fabric.global_rank)
        return means


def test_metrics_of_every_module_meet_until_fabric_leaves_the_job(two_workers: WorkerPool) -> None:
    for means in two_workers.call(measure_by_fabric, timeout=200):
        assert means == [0.5, 0.5, 0.0, 0.0]


class OfBothRanks:
    """Batches of what both ranks' samplers give in the first epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        first, second = (list(DistributedSampler(Points().data, 2, rank, seed=0)) for rank in (0, 1))
        return iter([first[at : at + 4] + second[at : at + 4] for at in range(0, 8, 4)])


class Batched(Descending):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(2))


def fit_normalised(**arguments: Any) -> Any:
    with launched():
        return fitted(Batched(), "muster_ps", sees=False, max_epochs=1, limit_train_batches=2, sync_batchnorm=True,
                      limit_val_batches=0, **arguments)["parameters"]  # fmt: skip


def test_workers_of_servers_normalise_over_the_whole_batch(two_workers: WorkerPool) -> None:
    ours = two_workers.call(fit_normalised, timeout=200)
    whole = Batched()
    trainer("auto", devices=1, max_epochs=1).fit(whole, DataLoader(Points().data, batch_sampler=OfBothRanks()))
    for found in ours:
        assert_same(found, plain(whole.state_dict()), 1e-5)


def refuse_on_servers() -> None:
    with launched():
        for module, arguments, message in [
            (Clipped(), {}, "configure_gradient_clipping would run where no gradients are.*muster_ddp"),
            (Classifier(), {"callbacks": [Hooks()]}, "on_before_backward would run where no gradients are"),
            (Classifier(), {"callbacks": [GradientAccumulationScheduler({1: 2})]}, "use accumulate_grad_batches"),
            (Alternating(False), {}, "automatic_optimization=False"),
            (Classifier(), {"devices": 3}, "start workers with muster run --workers"),
            (Odd("none"), {}, "return a loss that is 0"),
            (Odd("no optimizer"), {}, "gave 0 optimizers"),
            (
                Batched(),
                {"callbacks": [StochasticWeightAveraging(1e-2)]},
                "StochasticWeightAveraging runs steps of Batch",
            ),
            (Classifier(), {"callbacks": [LearningRateFinder()]}, "LearningRateFinder takes steps back"),
            (Classifier(), {"callbacks": [Unfreezing()]}, "Unfreezing adds parameters"),
        ]:
            with pytest.raises(muster.InvalidArgument, match=message):
                trainer("muster_ps", **arguments).fit(module, datamodule=Points())
        with pytest.raises(muster.InvalidArgument, match="gradient_clip_val"):
            muster.lightning.ParameterServerStrategy(server_options={"clip_norm": 1.0})
        with pytest.raises(muster.InvalidArgument, match="server_options has 'devices'"):
            muster.lightning.ParameterServerStrategy(server_options={"devices": ["cpu"] * 2})
        with pytest.raises(muster.InvalidArgument, match="muster_options has 'devices'"):
            muster.lightning.FabricParameterServerStrategy(muster_options={"devices": ["cpu"] * 2})
        for given in ({"devices": 3}, {"num_nodes": 2}):
            with pytest.raises(muster.InvalidArgument, match=r"Fabric has.*start workers with muster run --workers"):
                lightning.Fabric(accelerator="cpu", strategy="muster_ps", **given).launch()


def test_what_servers_cannot_do_is_an_error_that_names_what_to_do(two_workers: WorkerPool) -> None:
    two_workers.call(refuse_on_servers, timeout=200)


def test_servers_train_one_model_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Servers(1), Servers(1)
    monkeypatch.setenv("MUSTER_SERVERS", first.addresses[0])
    skipping = Odd("none")
    before = plain(skipping.state_dict())
    trainer("muster_ps", max_epochs=1).fit(skipping, Points())  # which a worker alone may do
    assert_same(plain(skipping.state_dict()), before)
    with pytest.raises(muster.InvalidArgument, match="start a job for each fit"):
        trainer("muster_ps", max_epochs=1).fit(Odd("plain"), Points())

    monkeypatch.setenv("MUSTER_SERVERS", second.addresses[0])
    found = fitted(Classifier(), muster.lightning.ParameterServerStrategy(staleness=2), sees=False, max_epochs=4)
    assert found["steps"] == 24
    assert sum(found["losses"][-6:]) < sum(found["losses"][:6])


def test_what_lightnings_launcher_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for make in (muster.lightning.ParameterServerStrategy, muster.lightning.FabricParameterServerStrategy):
        with pytest.raises(muster.InvalidArgument, match=r"no rank is known.*a Trainer or Fabric.*out of os\.environ"):
            make()


# --- all three --------------------------------------------------------------------------------------------------------


class Summarised(Classifier):
    """With an example of its inputs, from which Lightning computes the sizes of all."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Summary(ModelSummary):
    """Keeps what it would print."""

    def summarize(self, *summary: Any, **more: Any) -> None:  # type: ignore[override]
        self.kept = summary, more


def summarised(strategy: str, devices: int | None = None) -> Any:
    module, summary = Summarised(), Summary(max_depth=2)
    arguments = {"devices": devices} if devices else {}
    run = trainer(strategy, max_epochs=1, limit_train_batches=2, callbacks=[summary], **arguments)
    run.fit(module, Points())
    assert run.global_step == 2
    return summary.kept if run.is_global_zero else None


def summarised_by_ranks(strategy: str, devices: int | None = None) -> Any:
    with launched():
        return summarised(strategy, devices)


@pytest.mark.parametrize("strategy", ["muster_mirrored", "muster_ddp", "muster_ps"])
def test_a_model_is_summarised_as_by_lightning(two_workers: WorkerPool, strategy: str) -> None:
    expected = summarised("auto", 1)
    data, parameters, *_ = expected[0]
    assert dict(data)["In sizes"] == ["[3, 6]", "[3, 6]", "[3, 16]", "[3, 16]"]
    assert parameters == 6 * 16 + 16 + 16 * 2 + 2
    if strategy == "muster_mirrored":
        assert summarised(strategy, 2) == expected
    else:
        devices = 2 if strategy == "muster_ddp" else None
        assert two_workers.call(summarised_by_ranks, strategy, devices) == [expected, None]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("DDPStrategy", {"find_unused_parameters": True}), ("MirroredStrategy", {"balance": "auto"})],
)
def test_a_config_file_gives_strategies_their_options(
    strategy: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"class_path": f"muster.lightning.{strategy}", "init_args": options}
    config = {"trainer": {**QUIET, "accelerator": "cpu", "max_epochs": 1, "strategy": chosen}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(tmp_path / "config.yaml"), "--trainer.devices", "1"])
    with mock.patch.dict(os.environ):  # Lightning leaves its meeting place there, and the group that it has made
        cli = LightningCLI(Descending, Points, run=False, save_config_callback=None)
        assert type(cli.trainer.strategy) is getattr(muster.lightning, strategy)
        given = cli.config.trainer.strategy.init_args
        assert {name: given[name] for name in options} == options
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        assert cli.trainer.global_step == 6
        if dist.is_initialized():
            dist.destroy_process_group()


EXAMPLE = "examples/migrations/lightning_digits.py"


def example_by_ranks(*options: str) -> str:
    with launched():
        return output_of(str(ROOT / EXAMPLE), *options)


def test_processes_that_lightning_starts_print_what_lightnings_strategy_prints(two_workers: WorkerPool) -> None:
    options = ("--epochs", "1", "--batch-size", "32", "--devices", "2", "--strategy")
    command = [sys.executable, EXAMPLE, *options, "muster_ddp"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        chief, other = two_workers.call(example_by_ranks, *options, "ddp")
        printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    pattern = r"loss ([\d.]+), accuracy ([\d.]+)"
    [ours], [theirs] = re.findall(pattern, printed), re.findall(pattern, chief)
    assert list(map(float, ours)) == pytest.approx(list(map(float, theirs)), abs=1e-3)
    assert "loss" not in other


@pytest.mark.long
def test_the_example_prints_what_lightnings_strategies_print() -> None:
    ranks = ["--batch-size", "32", "--epochs", "2"]
    commands = [
        [[sys.executable, EXAMPLE, "--epochs", "2"],
         [sys.executable, EXAMPLE, "--epochs", "2", "--strategy", "muster_mirrored", "--devices", "2"]],
        [[sys.executable, EXAMPLE, *ranks, "--strategy", "ddp", "--devices", "2"],
         [sys.executable, EXAMPLE, *ranks, "--strategy", "muster_ddp", "--devices", "2"],
         [sys.executable, "-m", "muster", "run", "--workers", "2", "--servers", "1", EXAMPLE, *ranks, "--strategy",
          "muster_ps"]],
    ]  # fmt: skip
    for alike in commands:
        found = []
        for command in alike:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stdout + done.stderr
            (line,) = re.findall(r"loss ([\d.]+), accuracy ([\d.]+)", done.stdout)
            found.append([float(number) for number in line])
        for other in found[1:]:
            assert other == pytest.approx(found[0], abs=1e-3)
        assert found[0][0] < 2


def test_muster_itself_does_without_lightning() -> None:
    package = ROOT / "python" / "muster"
    others = [path for path in package.rglob("*.py") if (package / "lightning") not in path.parents]
    assert [path.name for path in others if re.search(r"(import|from) (muster\.)?lightning", path.read_text())] == []


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "muster.lightning")
    with pytest.raises(ImportError, match=r"needs Lightning.*pip install"):
        importlib.import_module("muster.lightning")


@pytest.mark.parametrize(("address", "host"), [("node1:29500", "node1"), ("[fe80::1]:29500", "fe80::1")])
def test_lightning_is_told_the_chiefs_host_without_brackets(address: str, host: str) -> None:
    job = Job(muster.Cluster(0, 2, address))
    assert (job.main_address, job.main_port) == (host, 29500)
