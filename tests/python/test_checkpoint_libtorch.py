"""muster checkpoint convert: what C++ programs leave with torch::save (programs/libtorch_archives)."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muster
from muster.checkpoint import libtorch
from muster.checkpoint.importing import Order, convert
from muster.errors import CheckpointError
from support.checkpoints import mirrored

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")

ARCHIVES = Path(__file__).resolve().parents[1] / "programs" / "libtorch_archives"

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.5, betas=(0.5, 0.75), weight_decay=0.25),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.75),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.5, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5),
    "both": lambda p: torch.optim.AdamW(p, lr=0.5, amsgrad=True),
}


def build() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter))
    return module


def after_steps(optimizer: Optimizer, number: int) -> dict[str, Tensor]:
    """What Python makes of the same steps."""
    module = build()
    user = optimizer(module.parameters())
    for _ in range(number):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        user.step()
    return dict(module.state_dict())


def converted(folder: Path, *names: str) -> Path:
    sources = [str(ARCHIVES / f"{name}.pt") for name in names]
    return convert(Order(sources, str(folder)))[0].parent


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_where_the_program_in_cpp_ended(name: str, fuse: bool, tmp_path: Path) -> None:
    files = ["both"] if name == "both" else [f"{name}_module", name]
    folder = converted(tmp_path / "runs", *files)
    with mirrored(fuse=fuse) as strategy:
        module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        # The rate and the rest are those of the checkpoint.
        classes = type(OPTIMIZERS[name](module.parameters()))
        model, optimizer = strategy.prepare(module, classes(module.parameters(), lr=9.0))
        found = strategy.load(folder)
        assert found == ({"epoch": 7} if name == "both" else {})
        torch.testing.assert_close(dict(module.state_dict()), after_steps(OPTIMIZERS[name], 1))
        strategy.step(lambda: sum(parameter.sum() for parameter in model.parameters()))
        torch.testing.assert_close(dict(module.state_dict()), after_steps(OPTIMIZERS[name], 2))
        assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["adam", "sgd", "rmsprop", "adagrad"])
def test_the_state_is_of_the_kinds_that_python_has(name: str, tmp_path: Path) -> None:
    module = build()
    user = OPTIMIZERS[name](module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    user.step()
    expected = user.state_dict()
    found = muster.checkpoint.optimizer_state(converted(tmp_path, f"{name}_module", name))
    torch.testing.assert_close(found["state"], expected["state"])
    for option, value in found["param_groups"][0].items():
        assert value == expected["param_groups"][0][option]


def test_an_optimizer_of_other_options_is_refused(tmp_path: Path) -> None:
    folder = converted(tmp_path, "adam_module", "adam")
    with mirrored() as strategy:
        module = build()
        strategy.prepare(module, torch.optim.RMSprop(module.parameters()))
        with pytest.raises(muster.LayoutMismatch, match=r"is RMSprop, which has 'momentum'.*with lr, betas"):
            strategy.load(folder)


def test_modules_of_torchscript_are_read_for_their_tensors(tmp_path: Path) -> None:
    torch.jit.script(build()).save(str(tmp_path / "a.pt"))
    folder = convert(Order([str(tmp_path / "a.pt")], str(tmp_path / "runs")))[0]
    state = muster.checkpoint.model_state(folder)
    assert state.keys() == build().state_dict().keys()
    torch.testing.assert_close(state, dict(build().state_dict()), rtol=0, atol=0)


def rewritten(path: Path, record: str, change: Callable[[bytes], bytes]) -> Path:
    """An archive with one record changed."""
    changed = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith(f"/{record}") else content)
    return changed


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self.mark,)


def test_no_code_of_an_archive_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    shutil.copy(ARCHIVES / "adam_module.pt", tmp_path / "a.pt")
    evil = rewritten(tmp_path / "a.pt", "data.pkl", lambda _: pickle.dumps(Evil(mark), protocol=2))
    with pytest.raises(muster.CheckpointError, match=r"changed.pt.*without running its code.*mkdir"):
        convert(Order([str(evil)], str(tmp_path / "runs")))
    assert not mark.exists() and not (tmp_path / "runs").exists()
    # The TorchScript is not even looked at.
    broken = rewritten(tmp_path / "a.pt", "code/__torch__.py", lambda _: b"this is no TorchScript")
    with pytest.raises(RuntimeError):
        torch.jit.load(str(broken))
    convert(Order([str(broken)], str(tmp_path / "runs")))
    assert muster.checkpoint.model_state(tmp_path / "runs")["2.bias"].shape == (1,)


def test_tensors_beyond_their_storage_and_damaged_records_are_refused(tmp_path: Path) -> None:
    shutil.copy(ARCHIVES / "adam_module.pt", tmp_path / "a.pt")
    # The sizes (2, 3) of the first tensor.
    grown = rewritten(tmp_path / "a.pt", "data.pkl", lambda text: text.replace(b"(K\x02K\x03t", b"(K\x02K\x99t", 1))
    with pytest.raises(muster.CheckpointError, match="beyond its storage"):
        convert(Order([str(grown)], str(tmp_path / "runs")))
    cut = rewritten(tmp_path / "a.pt", "data/0", lambda content: content[:-4])
    with pytest.raises(muster.CheckpointError, match=r"changed.pt"):
        convert(Order([str(cut)], str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_master_copies_of_flat_optimizers_are_found() -> None:
    def bag(**fields: Any) -> libtorch._Bag:
        made = libtorch._Bag()
        vars(made).update(fields)
        return made

    group = {"params/size": 2, "params/0": "10", "params/1": "20", "options": bag(lr=0.5)}
    groups = bag(**{"param_groups/size": 1, "param_groups/0": bag(**group)})
    masters = [torch.arange(3.0), torch.arange(2.0)]
    archive = {"pytorch_version": "2", "param_groups": groups, "state": bag(**{"20": bag(step=4)})}
    found = libtorch._optimizer(bag(**archive, masters=bag(**{"0": masters[0], "1": masters[1]})), Path("x.pt"))
    assert found["state"][0] == {"master": masters[0]}
    assert found["state"][1] == {"step": torch.tensor(4.0), "master": masters[1]}
    assert "master" not in libtorch._optimizer(bag(**archive), Path("x.pt"))["state"][1]
    with pytest.raises(CheckpointError, match="none that torch::save writes"):
        libtorch._optimizer(bag(**archive, masters=bag(**{"2": masters[0]})), Path("x.pt"))
