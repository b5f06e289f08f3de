"""muster.checkpoint.StorageReader and StorageWriter: torch.distributed.checkpoint over Muster's checkpoints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typer.testing import CliRunner

import muster
from muster.checkpoint import StorageReader, StorageWriter
from muster.cli import app
from support.checkpoints import build, mirrored, same, saved, two_groups
from support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return done.exit_code, done.stdout


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("original") / "runs"
    return folder, saved(folder, rate=0.5)


def fresh() -> tuple[Any, Any]:
    """With the options that a schedule adds."""
    module = build()
    optimizer = two_groups(module)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return module, optimizer


def test_names_of_parameters_find_what_a_strategy_saved(original: tuple[Path, list[Any]]) -> None:
    runs, states = original
    for path, (weights, packed) in ((runs, states[2]), (runs / "1", states[0])):
        module, optimizer = fresh()
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "rate": 0.0, "steps": 0}
        dcp.load(state, storage_reader=StorageReader(path))
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert same(dict(module.state_dict()), weights) and same(optimizer.state_dict()["state"], packed["state"])
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in packed["param_groups"]]
        assert state["rate"] == 0.5 and state["steps"] == (3 if path == runs else 1)


def test_numbers_of_parameters_find_what_a_strategy_saved(original: tuple[Path, list[Any]]) -> None:
    runs, states = original
    module, optimizer = fresh()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that there is state to load into
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, storage_reader=StorageReader(runs, numbers=True))
    optimizer.load_state_dict(state["optimizer"])
    assert same(dict(module.state_dict()), states[2][0])
    assert same(optimizer.state_dict()["state"], states[2][1]["state"])


def test_what_is_saved_is_read_and_verified_and_shown(tmp_path: Path) -> None:
    module, optimizer = fresh()
    extra = {"pair": (1, None), "text": "é", "nested": {"list": [torch.ones(2), {"x": 3}]}, "none": []}
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), **extra}
    writer = StorageWriter(tmp_path / "runs", keep=2)
    for epoch in range(3):
        dcp.save({**state, "epoch": epoch}, storage_writer=writer)
    code, out = run("verify", tmp_path / "runs")
    assert code == 0 and len(out.splitlines()) == 2
    found = json.loads(run("show", "--json", tmp_path / "runs")[1])
    assert found["number"] == 3 and found["values"]["epoch"] == 2
    assert {"name": "model.0.weight", "dtype": "float32", "shape": [6, 8], "bytes": 192} in found["tensors"]
    assert "epoch = 2" in run("show", tmp_path / "runs")[1]
    code, out = run("diff", tmp_path / "runs" / "2", tmp_path / "runs")
    assert code == 1 and "epoch: 1 and 2" in out and "1 differences" in out

    other, _ = fresh()
    back: dict[str, Any] = {
        "model": other.state_dict(), "pair": None, "text": "", "epoch": 0,
        "nested": {"list": [torch.zeros(2), {"x": 0}]}, "none": None,
    }  # fmt: skip
    dcp.load(back, storage_reader=StorageReader(tmp_path / "runs"))
    assert same(back["model"], dict(module.state_dict())) and back["epoch"] == 2
    assert same({name: back[name] for name in extra}, extra)
    dcp.load(back, storage_reader=StorageReader(tmp_path / "runs"), checkpoint_id=tmp_path / "runs" / "2")
    assert back["epoch"] == 1
    dcp.save({"epoch": 9}, storage_writer=writer, checkpoint_id=tmp_path / "elsewhere")
    assert json.loads(run("show", "--json", tmp_path / "elsewhere")[1])["values"] == {"epoch": 9}


def test_what_a_checkpoint_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for value in ({1, 2}, tmp_path):
        with pytest.raises(CheckpointException, match=r"InvalidArgument: 'x' is no tensor"):
            dcp.save({"w": torch.ones(2), "x": value}, storage_writer=StorageWriter(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with mirrored() as strategy:
        strategy.prepare(build())
        strategy.save(tmp_path)
        with pytest.raises(CheckpointException, match="another process uses the folder"):
            dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path))


def test_the_readers_errors_are_plain(original: tuple[Path, list[Any]], tmp_path: Path) -> None:
    with pytest.raises(muster.CheckpointError, match="no folder"):
        StorageReader(tmp_path / "absent")
    dcp.save({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path / "runs"))
    with pytest.raises(muster.CheckpointError, match=r"checkpoint of torch.distributed.checkpoint; give"):
        muster.checkpoint.model_state(tmp_path / "runs")
    with mirrored() as strategy:
        strategy.prepare(build())
        with pytest.raises(muster.CheckpointError, match="no checkpoints of a strategy"):
            strategy.load(tmp_path / "runs")
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"other": torch.ones(2)}, storage_reader=StorageReader(tmp_path / "runs"))
    assert StorageReader.validate_checkpoint_id(original[0])
    assert not StorageReader.validate_checkpoint_id(tmp_path / "absent")


def sharded(folder: str, meeting: str) -> list[Any]:
    """Two ranks save tensors that are divided among them, and read them divided in another way."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def divided(tensor: Tensor, dimension: int) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(dimension)])

    state = {"rows": divided(torch.arange(15.0).view(5, 3), 0), "whole": torch.arange(4), "rank": 7}
    dcp.save(state, storage_writer=StorageWriter(folder))
    dist.barrier()
    back: dict[str, Any] = {
        "rows": divided(torch.zeros(5, 3), 1),
        "whole": torch.zeros(4, dtype=torch.int64),
        "rank": 0,
    }
    dcp.load(back, storage_reader=StorageReader(folder))
    result = [back["rows"].full_tensor().tolist(), back["whole"].tolist(), back["rank"]]
    dist.destroy_process_group()
    return result


def test_tensors_that_are_divided_among_ranks_are_whole_in_a_checkpoint(tmp_path: Path) -> None:
    expected = [torch.arange(15.0).view(5, 3).tolist(), [0, 1, 2, 3], 7]
    assert run_ranks(2, sharded, str(tmp_path / "runs"), str(tmp_path / "meeting")) == [expected, expected]
    one = {"rows": torch.zeros(5, 3), "whole": torch.zeros(4, dtype=torch.int64), "rank": 0}
    dcp.load(one, storage_reader=StorageReader(tmp_path / "runs"))
    assert [one["rows"].tolist(), one["whole"].tolist(), one["rank"]] == expected


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    first, second = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in (first, second):
        exec(compile(block, str(page), "exec"), names)
    assert same(names["state"]["model"], muster.checkpoint.model_state("runs")) and Path("others").is_dir()
