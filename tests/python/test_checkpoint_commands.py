"""muster checkpoint verify, show and diff, and what muster.checkpoint reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import muster
from muster import checkpoint, saved_tree
from muster.cli import app
from support.checkpoints import build, mirrored, same, saved, two_groups


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def write(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Path:
    return Path(muster._C._checkpoint.write_snapshot(folder, tensors, metadata))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("original") / "runs"
    return folder, saved(folder, rate=0.5, average={"w": torch.ones(2, 5)})


@pytest.fixture
def runs(original: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    """Three checkpoints, after steps 1, 2 and 3."""
    return Path(shutil.copytree(original[0], tmp_path / "runs"))


def number(folder: Path, which: int) -> Path:
    return folder / f"snapshot-{which:010}"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# --- verify -----------------------------------------------------------------------------------------------------------
def test_good_checkpoints_are_said_to_be_good(runs: Path) -> None:
    code, out, _ = run("verify", runs)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3
    for which, line in enumerate(lines, start=1):
        assert line.startswith(f"{number(runs, which)}: good") and f"step {which}" in line
    assert run("verify", runs / "2")[1] == lines[1] + "\n" == run("verify", number(runs, 2))[1]


def test_folders_of_other_names_are_no_checkpoints(runs: Path) -> None:
    for name in ("7", "00000000007", "0000000000", "٠٠٠٠٠٠٠٠٠٧", f"{1 << 63}"):
        (runs / f"snapshot-{name}").mkdir()
    assert run("verify", runs)[0] == 0
    assert [folder.name[-1] for folder in checkpoint.reading.folders_in(runs)] == ["1", "2", "3"]


@pytest.mark.parametrize("file", ["manifest.json", "shard-00000.safetensors"])
@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-3])])
def test_a_damaged_file_is_named(file: str, damage: Any, runs: Path) -> None:
    damage(number(runs, 2) / file)
    code, out, error = run("verify", runs)
    first, second, third = out.splitlines()
    assert code == 1 and "good" in first and "good" in third
    assert "DAMAGED" in second and f"'{number(runs, 2) / file}'" in second
    assert "1 of 3" in error
    assert run("verify", runs / "2")[0] == 1 and run("verify", runs / "3")[0] == 0


def test_a_document_that_lacks_a_tensor_is_damage(tmp_path: Path) -> None:
    document, _ = saved_tree.encode({"modules": [{"a": torch.ones(1)}]})
    write(tmp_path, {}, {"muster.format": 1, "content": document})
    code, out, _ = run("verify", tmp_path)
    assert code == 1 and "modules/0/a" in out


def test_a_path_without_checkpoints_is_exit_code_2(runs: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    file = tmp_path / "file"
    file.touch()
    for command in ("verify", "show"):
        for path in (empty, tmp_path / "absent", file):
            code, _, error = run(command, path)
            assert code == 2 and f"'{path}'" in error and "strategy.save()" in error
    code, _, error = run("show", runs / "7")
    assert code == 2 and "it has 1, 2, 3" in error


def test_folders_of_several_servers_are_named(tmp_path: Path) -> None:
    for server in (10, 2):
        write(tmp_path / f"server-{server}", {"a": torch.zeros(2)}, {"kind": "muster parameter server"})
    for command in ("verify", "show"):
        code, _, err = run(command, tmp_path)
        assert code == 2
        assert f"parameter servers 2, 10; give one of them: {tmp_path}/server-N" in " ".join(err.split())
    assert run("verify", tmp_path / "server-2")[0] == 0


def test_verify_as_a_command_of_the_shell(runs: Path) -> None:
    command = [sys.executable, "-m", "muster", "checkpoint", "verify", str(runs)]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    flip(number(runs, 1) / "manifest.json")
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1


# --- show -------------------------------------------------------------------------------------------------------------
def test_show_tells_machines_what_a_checkpoint_holds(runs: Path) -> None:
    os.utime(number(runs, 3) / "manifest.json", (2e9, 2e9))
    found = json.loads(run("show", "--json", runs)[1])
    assert (found["number"], found["steps"], found["written"]) == (3, 3, 2e9)
    assert found["strategy"] == {"steps": 3, "calls": 3, "seed": "1", "workers": 1, "replicas": 1}
    assert (found["muster_version"], found["torch_version"]) == (muster.__version__, torch.__version__)
    assert found["bytes"] == sum(file.stat().st_size for file in number(runs, 3).iterdir())
    (module,) = found["modules"]
    expected = {name: [str(t.dtype)[6:], list(t.shape)] for name, t in build().state_dict().items()}
    assert {each["name"]: [each["dtype"], each["shape"]] for each in module["tensors"]} == expected
    (optimizer,) = found["optimizers"]
    assert optimizer["name"] == "AdamW" and [len(group["params"]) for group in optimizer["groups"]] == [1, 5]
    # The schedule's: once after two steps.
    assert [group["lr"] for group in optimizer["groups"]] == pytest.approx([0.003, 0.001])
    moments = {each["name"]: each["shape"] for each in optimizer["state"]["0.weight"]["tensors"]}
    assert moments == {"step": [], "exp_avg": [6, 8], "exp_avg_sq": [6, 8]}
    assert found["loaders"] == [{"epoch": 0, "batches": 3, "generators": 0}] and found["generators"] == 1
    assert found["state"]["rate"] == {"kind": "value", "value": 0.5}
    assert found["state"]["average"]["value"] == {"w": {"dtype": "float32", "shape": [2, 5]}}
    assert found["state"]["schedule"]["kind"] == "object"
    assert json.loads(run("show", "--json", runs / "1")[1])["steps"] == 1


def test_show_tells_people(runs: Path) -> None:
    code, out, _ = run("show", runs)
    assert code == 0
    for words in (
        str(number(runs, 3)), "3, by 3 calls", "1 worker, 1 replica", f"Muster {muster.__version__}", "AdamW",
        "0.weight               float32  [6, 8]", "1.num_batches_tracked  int64    []", "exp_avg_sq  float32  [6, 8]",
        "group 1: 5 parameters, lr=0.001", "epoch 0, 3 batches in", "object 'schedule'", "value 'rate' 0.5",
    ):  # fmt: skip
        assert words in out, words


def test_an_optimizers_state_of_no_parameter_is_shown_and_compared_and_exported(tmp_path: Path) -> None:
    for name, seen in (("a", 7), ("b", 8)):
        module = torch.nn.Linear(2, 1)
        optimizer: Any = torch.optim.RMSprop(module.parameters())
        with mirrored() as strategy:
            strategy.prepare(module, optimizer)
            optimizer.state["seen"] = seen
            strategy.save(tmp_path / name)
    assert json.loads(run("show", "--json", tmp_path / "a")[1])["optimizers"][0]["others"] == {"seen": 7}
    assert "of no parameter: seen=7" in run("show", tmp_path / "a")[1]
    assert "optimizers/0/others/seen: 7 and 8" in run("diff", tmp_path / "a", tmp_path / "b")[1]
    run("convert", tmp_path / "a", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["optimizer"]["state"] == {"seen": 7}


def test_infinities_are_shown_and_json_stays_json(tmp_path: Path) -> None:
    with mirrored() as strategy:
        strategy.save(tmp_path, rate=float("inf"), pair=(1, float("nan")))
    state = json.loads(run("show", "--json", tmp_path)[1], parse_constant=pytest.fail)["state"]
    assert state["rate"]["value"] == "inf" and state["pair"]["value"] == [1, "nan"]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(number(runs, 3) / "manifest.json")
    assert json.loads(run("show", "--json", runs)[1])["number"] == 2
    assert "passed over" in caplog.text and str(number(runs, 3)) in caplog.text
    code, out, error = run("show", runs / "3")
    assert code == 1 and out == "" and "manifest.json" in error


def test_snapshots_of_servers_and_of_others_are_said_to_be_such(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16)}
    write(tmp_path / "server", tensors, {"kind": "muster parameter server", "layout": 3, "step": 5})
    write(tmp_path / "else", tensors, {})
    write(tmp_path / "later", tensors, {"muster.format": 99, "muster.version": "9", "content": "later's"})
    for name, words in {"server": "parameter server", "else": "something else", "later": "format 99"}.items():
        code, out, _ = run("show", tmp_path / name)
        assert code == 0 and words in out and "bfloat16  [3]" in out
        assert json.loads(run("show", "--json", tmp_path / name)[1])["tensors"][0]["name"] == "a"
        with pytest.raises(muster.CheckpointError, match=words):
            checkpoint.model_state(tmp_path / name)
        assert run("verify", tmp_path / name)[0] == run("diff", tmp_path / name, tmp_path / name)[0] == 0
    assert "parameter server" in run("verify", tmp_path / "server")[1]


# --- diff -------------------------------------------------------------------------------------------------------------
def test_checkpoints_with_the_same_bits_are_equal(runs: Path, tmp_path: Path) -> None:
    saved(tmp_path / "again", rate=0.5, average={"w": torch.ones(2, 5)})
    code, out, _ = run("diff", runs, tmp_path / "again")
    assert code == 0 and "no differences" in out
    assert run("diff", runs / "1", tmp_path / "again" / "1")[0] == 0
    assert run("diff", runs / "1", runs / "2")[0] == 1
    assert run("diff", runs, tmp_path)[0] == 2


def state_of(folder: Path, **state: Any) -> Path:
    with mirrored(seed=1) as strategy:
        torch.manual_seed(0)
        strategy.save(folder, **state)
    return folder


def test_every_difference_is_said(tmp_path: Path) -> None:
    zeros, other = torch.zeros(2, 3), torch.zeros(2, 3)
    other[1, 1], other[0, 2] = -0.25, 0.125
    same_nan = torch.tensor([float("nan"), 1.0])
    first = {
        "values": zeros, "dtype": zeros, "shape": zeros, "bits": torch.zeros(2), "nan": same_nan, "rate": 0.5,
        "none": float("nan"), "kind": 1, "ours": 7, "counts": torch.tensor([1, 2, 3]), "list": [1, (2, 3)],
        "yes": torch.tensor([True]), "complex": torch.tensor([1 + 2j, 3 - 1j]),
    }  # fmt: skip
    second = {
        "values": other, "dtype": zeros.double(), "shape": zeros.T, "bits": -torch.zeros(2), "nan": same_nan.clone(),
        "rate": 0.25, "none": float("nan"), "kind": 1.0, "theirs": zeros, "counts": torch.tensor([1, 2, 9]),
        "list": [1, (2, 4)], "yes": torch.tensor([False]), "complex": torch.tensor([1 + 2.5j, 3 - 1j]),
    }  # fmt: skip
    code, out, _ = run("diff", state_of(tmp_path / "a", **first), state_of(tmp_path / "b", **second))
    assert code == 1
    lines = [line.removeprefix("state/") for line in out.splitlines() if line.startswith("state/")]
    assert sorted(lines) == [
        "bits/value: 2 of 2 elements differ, by at most 0",
        "complex/value: 1 of 2 elements differ, by at most 0.5",
        "counts/value: 1 of 3 elements differ, by at most 6",
        "dtype/value: float32 [2, 3] and float64 [2, 3]",
        "kind/value: 1 and 1.0",
        "list/value/1: (2, 3) and (2, 4)",
        "ours/value: only in the first, 7",
        "rate/value: 0.5 and 0.25",
        "shape/value: float32 [2, 3] and float32 [3, 2]",
        "theirs/value: only in the second, float32 [2, 3]",
        "values/value: 2 of 6 elements differ, by at most 0.25",
        "yes/value: 1 of 1 elements differ, by at most 1",
    ]
    assert out.splitlines()[-1].startswith("12 differences; ")


def test_values_whose_places_read_alike_are_told_apart(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        state_of(tmp_path / name, nested={"a": {"b": value}, "a/b": 5, 1: value, "1": 5})
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and out.count(": 1 and 2") == 2


def test_no_file_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the current folder was run')")
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.chdir(tmp_path)
    code, _, said = run("convert", "m.pt", "converted")
    assert code == 0, said


def test_a_damaged_checkpoint_is_neither_equal_nor_different(runs: Path) -> None:
    flip(number(runs, 3) / "shard-00000.safetensors")
    code, _, error = run("diff", runs / "3", runs / "2")
    assert code == 2 and "shard-00000.safetensors" in error


def test_snapshots_of_others_are_compared_too(tmp_path: Path) -> None:
    for name, value in {"a": 1.0, "b": 1.0, "c": 3.0}.items():
        write(tmp_path / name, {"w": torch.full((4,), value)}, {"kind": "x", "step": int(value)})
    assert run("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    code, out, _ = run("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1 and "tensors/w: 4 of 4 elements differ, by at most 2" in out and "metadata/step: 1 and 3" in out


# --- in Python --------------------------------------------------------------------------------------------------------
def test_a_plain_module_and_optimizer_take_the_states(runs: Path, original: tuple[Path, list[Any]]) -> None:
    for path, (module_state, optimizer_state) in ((runs, original[1][2]), (str(runs / "1"), original[1][0])):
        module = build()
        module.load_state_dict(checkpoint.model_state(path))
        assert same(dict(module.state_dict()), module_state)
        packed = checkpoint.optimizer_state(path)
        assert same(packed, optimizer_state)
        optimizer = two_groups(module)
        optimizer.load_state_dict(packed)
        assert same(optimizer.state_dict()["state"], optimizer_state["state"])


def test_modules_and_optimizers_are_counted(tmp_path: Path) -> None:
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*two.parameters(), *one.parameters()], lr=0.25, momentum=0.5)
    with mirrored() as strategy:
        strategy.prepare(one, two, optimizer)
        strategy.save(tmp_path)
    assert same(checkpoint.model_state(tmp_path, 1), dict(two.state_dict()))
    assert checkpoint.optimizer_state(tmp_path)["param_groups"][0]["params"] == [0, 1, 2, 3]
    for wrong in (2, -1, True):
        with pytest.raises(muster.InvalidArgument, match="modules 0 to 1"):
            checkpoint.model_state(tmp_path, wrong)
    with pytest.raises(muster.InvalidArgument, match="no optimizer 1"):
        checkpoint.optimizer_state(tmp_path, 1)
    with pytest.raises(muster.CheckpointError, match="no folder"):
        checkpoint.model_state(tmp_path / "absent")
