"""muster checkpoint convert: to and from files of torch, torch.distributed.checkpoint and safetensors."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

import muster
from muster import checkpoint, saved_tree
from muster.checkpoint.importing import Order
from muster.checkpoint.importing import convert as convert_here
from muster.cli import app
from support.checkpoints import DATA, Job, build, mirrored, same, saved, two_groups
from support.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def convert(*sources: Path, **options: Any) -> Path:
    """In this process, which is faster; the folder."""
    folder = Path(f"{sources[0]}.converted")
    convert_here(Order([str(source) for source in sources], str(folder), **options))
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("original") / "runs"
    return folder, saved(folder, rate=0.5)


def stepped(optimizer: Callable[[nn.Module], torch.optim.Optimizer] = two_groups) -> tuple[nn.Module, Any]:
    """A plain module and its optimizer, after a step."""
    torch.manual_seed(2)
    module = build()
    user = optimizer(module)
    nn.functional.cross_entropy(module(DATA.tensors[0]), DATA.tensors[1]).backward()
    user.step()
    return module, user


def loaded(folder: Path, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = two_groups) -> Any:
    """The states of a job that loaded the checkpoint, and what load() returned."""
    torch.manual_seed(3)
    with mirrored(seed=5) as strategy:
        job = Job(strategy, optimizer)
        found = strategy.load(folder)
        return *job.state(), found


# --- from Muster ------------------------------------------------------------------------------------------------------
def test_weights_for_inference_are_what_the_safetensors_library_reads(
    original: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    runs, states = original
    code, out, _ = run("convert", runs, tmp_path / "w.safetensors")
    assert code == 0 and out == f"{tmp_path / 'w.safetensors'}\n"
    assert same(load_file(tmp_path / "w.safetensors"), states[2][0])
    run("convert", runs / "1", tmp_path / "first.safetensors")
    assert same(load_file(tmp_path / "first.safetensors"), states[0][0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.safetensors", "w.safetensors"]


def test_torch_loads_all_with_weights_only(original: tuple[Path, list[Any]], tmp_path: Path) -> None:
    runs, states = original
    assert run("convert", runs, tmp_path / "all.pt")[0] == 0
    value = torch.load(tmp_path / "all.pt", weights_only=True)
    assert value["steps"] == 3 and value["rate"] == 0.5 and value["schedule"]["last_epoch"] == 3
    module = build()
    optimizer = two_groups(module)
    module.load_state_dict(value["model"])
    optimizer.load_state_dict(value["optimizer"])
    assert same(dict(module.state_dict()), states[2][0]) and same(value["optimizer"], states[2][1])
    assert same(optimizer.state_dict()["state"], states[2][1]["state"])


def test_several_modules_and_optimizers_are_lists(tmp_path: Path) -> None:
    one, two = nn.Linear(2, 1), nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.25) for module in (one, two)]
    with mirrored() as strategy:
        strategy.prepare(one, two, *optimizers)
        strategy.save(tmp_path / "runs", model="the name of a part")
    run("convert", tmp_path / "runs", tmp_path / "all.pth")
    value = torch.load(tmp_path / "all.pth", weights_only=True)
    assert same(value["model"], [dict(one.state_dict()), dict(two.state_dict())]) and len(value["optimizer"]) == 2
    assert value["model_"] == "the name of a part"
    run("convert", tmp_path / "runs", tmp_path / "b.safetensors", "--module", 1)
    assert same(load_file(tmp_path / "b.safetensors"), dict(two.state_dict()))
    code, _, error = run("convert", tmp_path / "runs", tmp_path / "c.safetensors", "--module", 2)
    assert code == 1 and "modules 0 to 1" in error and not (tmp_path / "c.safetensors").exists()


def test_what_is_there_stays_and_what_cannot_be_is_said(original: tuple[Path, list[Any]], tmp_path: Path) -> None:
    runs, _ = original
    target = tmp_path / "a.pt"
    target.write_text("mine")
    code, _, error = run("convert", runs, target)
    assert code == 1 and "--overwrite" in error and target.read_text() == "mine"
    assert run("convert", runs, target, "--overwrite")[0] == 0 and torch.load(target)["steps"] == 3
    for sources, where, words in (
        ([runs], tmp_path / "folder", "Muster's already"),
        ([target], runs, "holds checkpoints"),
        ([target], tmp_path / "b.pt", "no checkpoint of Muster's"),
        ([runs, runs], tmp_path / "b.pt", "one checkpoint, and 2"),
        ([runs], tmp_path / "absent" / "b.pt", "no folder"),
        ([tmp_path / "absent.pt"], tmp_path / "folder", "no file"),
    ):
        code, _, error = run("convert", *sources, where)
        assert code == 1 and words in error and error.count("\n") == 1, error
    code, _, error = run("convert", runs / "9", tmp_path / "b.pt")
    assert code == 2 and "holds no checkpoint 9; it has 1, 2, 3" in error, error
    assert len(list(runs.glob("snapshot-*"))) == 3


# --- to Muster --------------------------------------------------------------------------------------------------------
def test_there_and_back_has_the_same_bits(original: tuple[Path, list[Any]], tmp_path: Path) -> None:
    runs, states = original
    run("convert", runs, tmp_path / "all.pt")
    code, out, _ = run("convert", tmp_path / "all.pt", tmp_path / "back", "--optimizer", "AdamW")
    assert code == 0 and out == f"{tmp_path / 'back' / 'snapshot-0000000001'}\n"
    module, optimizer, found = loaded(tmp_path / "back")
    assert same(module, states[2][0]) and same(optimizer, states[2][1])
    assert found["steps"] == 3 and found["rate"] == 0.5
    code, out, _ = run("diff", runs, tmp_path / "back")
    assert code == 1 and "modules/" not in out and "optimizers/" not in out  # where one has names, and one numbers


def test_a_plain_state_dict_is_a_module_alone_and_all_else_stays(tmp_path: Path) -> None:
    module, _ = stepped()
    torch.save(module.state_dict(), tmp_path / "w.pth")
    torch.save(module.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    for name in ("w.pth", "old.pt", "w.safetensors"):
        folder = convert(tmp_path / name)
        with mirrored(seed=5, precision="fp16", loss_scale=muster.LossScale(init=4.0)) as strategy:
            job = Job(strategy).train(2)
            before, place, random = job.state()[1], job.loader.state_dict(), torch.random.get_rng_state()
            assert strategy.load(folder) == {}
            assert same(dict(job.module.state_dict()), dict(module.state_dict()))
            assert same(job.state()[1], before) and torch.equal(torch.random.get_rng_state(), random)
            assert (strategy.steps, strategy.seed, job.loader.state_dict()) == (2, 5, place)
            assert float(strategy.loss_scaler(job.user).state_dict()["scale"]) == 4.0
        with pytest.raises(muster.InvalidArgument, match="no optimizers"):
            checkpoint.optimizer_state(folder)


def test_a_part_may_be_left_out_of_the_document(tmp_path: Path) -> None:
    module, _ = stepped()
    document, tensors = saved_tree.encode({"modules": [module.state_dict()]})
    muster._C._checkpoint.write_snapshot(tmp_path, tensors, {"muster.format": 1, "content": document})
    weights, _, found = loaded(tmp_path)
    assert same(weights, dict(module.state_dict())) and found == {}
    assert run("show", tmp_path)[0] == run("verify", tmp_path)[0] == run("diff", tmp_path, tmp_path)[0] == 0
    document, tensors = saved_tree.encode({"optimizers": None, "state": {"epoch": {"value": 4}}})
    muster._C._checkpoint.write_snapshot(tmp_path, tensors, {"muster.format": 1, "content": document})
    assert loaded(tmp_path)[2] == {"epoch": 4}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("model", "optimizer"), ("state_dict", "optimizer_states"), ("model_state_dict", "optimizer_state_dict")],
)
def test_a_dict_of_state_dicts(model: str, optimizer: str, tmp_path: Path) -> None:
    module, user = stepped()
    packed = [user.state_dict()] if optimizer == "optimizer_states" else user.state_dict()
    schedule = torch.optim.lr_scheduler.StepLR(user, 2)
    value = {
        model: module.state_dict(), optimizer: packed, "epoch": 4, "schedule": schedule.state_dict(),
        "average": {"w": torch.ones(3)},
    }  # fmt: skip
    torch.save(value, tmp_path / "all.pt")
    folder = convert(tmp_path / "all.pt")
    weights, state, found = loaded(folder)
    assert same(weights, dict(module.state_dict())) and same(state["state"], user.state_dict()["state"])
    assert [group["lr"] for group in state["param_groups"]] == [0.03, 0.01]
    assert found["epoch"] == 4 and found["schedule"]["last_epoch"] == 0
    with mirrored() as strategy:
        job = Job(strategy)
        job.schedule.last_epoch = 7
        strategy.load(folder, schedule=job.schedule)
        assert job.schedule.last_epoch == 0


def test_a_job_goes_on_from_converted_files_as_plain_torch_does(tmp_path: Path) -> None:
    def momentum(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    module, user = stepped(momentum)
    torch.save({"model": module.state_dict(), "optimizer": user.state_dict()}, tmp_path / "all.pt")
    with mirrored() as strategy:
        job = Job(strategy, momentum)
        strategy.load(convert(tmp_path / "all.pt"))
        strategy.step(lambda x, y: nn.functional.cross_entropy(job.model(x), y), *DATA[:8])
        user.zero_grad()
        nn.functional.cross_entropy(module(DATA[:8][0]), DATA[:8][1]).backward()
        user.step()
        for name, value in job.module.state_dict().items():
            torch.testing.assert_close(value, module.state_dict()[name])


def test_a_folder_that_a_job_writes_is_left_to_it(tmp_path: Path) -> None:
    file = tmp_path / "all.pt"
    torch.save({"model": build().state_dict()}, file)
    with mirrored() as strategy:
        folder = Path(f"{file}.converted")
        Job(strategy)
        strategy.save(folder)
        strategy._saving.writing.finish()
        shutil.rmtree(folder / "snapshot-0000000001")  # as if it were the first one, on its way
        with pytest.raises(muster.CheckpointError, match="another process uses the folder"):
            convert(file)


def test_names_are_known_where_the_file_says_them(tmp_path: Path) -> None:
    def named(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(reversed(list(module.named_parameters())), lr=0.01)

    module, user = stepped(named)
    torch.save({"model": module.state_dict(), "optimizer": user.state_dict()}, tmp_path / "all.pt")
    weights, state, _ = loaded(convert(tmp_path / "all.pt"), lambda module: torch.optim.Adam(module.parameters()))
    assert same(weights, dict(module.state_dict()))
    expected = user.state_dict()["state"]
    assert same(state["state"], {5 - number: values for number, values in sorted(expected.items(), reverse=True)})
    assert "param_names" not in state["param_groups"][0]  # those of the file, in its order


def test_prefixes_are_taken_off(tmp_path: Path) -> None:
    module, _ = stepped()
    torch.save({f"module.{name}": value for name, value in module.state_dict().items()}, tmp_path / "ddp.pt")
    weights, *_ = loaded(convert(tmp_path / "ddp.pt", strip_prefix="module."))
    assert same(weights, dict(module.state_dict()))
    with pytest.raises(muster.CheckpointError, match="does not begin with 'net'"):
        convert(tmp_path / "ddp.pt", strip_prefix="net")


def test_what_may_be_meant_otherwise_is_said(tmp_path: Path) -> None:
    module, user = stepped()
    names = {f"module.{name}": value for name, value in module.state_dict().items()}
    torch.save({"model": names, "optimizer": user.state_dict()}, tmp_path / "ddp.pt")
    code, _, errors = run("convert", tmp_path / "ddp.pt", tmp_path / "made", "--optimizer", "Adamw")
    assert code == 0
    assert "module 0 begin with 'module.', as DistributedDataParallel makes them: --strip-prefix module." in errors
    assert "torch.optim has no Adamw, which load() will insist on" in errors
    asked = ("--optimizer", "AdamW", "--strip-prefix", "module.")
    code, _, errors = run("convert", tmp_path / "ddp.pt", tmp_path / "new", *asked)
    assert (code, errors) == (0, "")


def test_modules_and_optimizers_of_several_files_add_up(tmp_path: Path) -> None:
    module, user = stepped()
    torch.save(module.state_dict(), tmp_path / "w.pt")
    torch.save(user.state_dict(), tmp_path / "o.pt")
    weights, state, _ = loaded(convert(tmp_path / "w.pt", tmp_path / "o.pt"))
    assert same(weights, dict(module.state_dict())) and same(state["state"], user.state_dict()["state"])


@pytest.mark.parametrize("names", [False, True])
def test_folders_of_torch_distributed_checkpoint(names: bool, tmp_path: Path) -> None:
    module, user = stepped()
    states = get_state_dict(module, user) if names else (module.state_dict(), user.state_dict())
    dcp.save({"model": states[0], "optimizer": states[1], "epoch": 4, "list": [1, 2]}, checkpoint_id=tmp_path / "dcp")
    weights, state, found = loaded(convert(tmp_path / "dcp"))
    assert same(weights, dict(module.state_dict())) and same(state["state"], user.state_dict()["state"])
    assert found["epoch"] == 4 and found["list"] == [1, 2]


# --- what load() refuses of them --------------------------------------------------------------------------------------
def test_an_optimizer_known_by_order_alone_is_compared_by_groups_and_shapes(tmp_path: Path) -> None:
    module, user = stepped()
    torch.save({"model": module.state_dict(), "optimizer": user.state_dict()}, tmp_path / "all.pt")
    folder = convert(tmp_path / "all.pt")

    def turned(module: nn.Module) -> torch.optim.Optimizer:
        last, *others = reversed(list(module.parameters()))
        return torch.optim.AdamW([{"params": [last]}, {"params": others[::-1]}])

    for optimizer, words in (
        (turned, r"'exp_avg' of parameter 1 of optimizer 0 has shape \(6, 8\)|has shape"),
        (lambda module: torch.optim.AdamW(module.parameters()), "1 groups, and in the checkpoint 2"),
        (lambda module: torch.optim.AdamW([{"params": ps} for ps in halves(module)]), "group 0 of optimizer 0 has 3"),
        (lambda module: torch.optim.SGD(module.parameters()), "is SGD, which has 'momentum'"),
        (lambda module: torch.optim.Adam(module.parameters()), "decoupled_weight_decay=True: AdamW"),
    ):
        with pytest.raises(muster.LayoutMismatch, match=words):
            loaded(folder, optimizer)
    named = convert_here(Order([str(tmp_path / "all.pt")], str(tmp_path / "named"), optimizers=("RAdam",)))
    with pytest.raises(muster.LayoutMismatch, match="is AdamW, and in the checkpoint RAdam"):
        loaded(named[0].parent)


def halves(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(module.parameters())
    return parameters[:3], parameters[3:]


# --- what is not read -------------------------------------------------------------------------------------------------
class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (self.mark,)


def test_code_in_pickles_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    module, _ = stepped()
    torch.save({"model": module.state_dict(), "x": Evil(mark)}, tmp_path / "a.pt")
    dcp.save({"model": module.state_dict(), "x": Evil(mark)}, checkpoint_id=tmp_path / "values")
    dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path / "metadata")
    (tmp_path / "metadata" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    for source in ("a.pt", "values", "metadata"):
        with pytest.raises(muster.CheckpointError, match=rf"'{tmp_path / source}' holds.*mkdir.*runs code"):
            convert(tmp_path / source)
        assert not mark.exists() and not (tmp_path / f"{source}.converted").exists()
    code, out, error = run("convert", tmp_path / "a.pt", tmp_path / "target")
    assert code == 1 and out == "" and "mkdir" in error and error.count("\n") == 1
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()  # it would have been seen


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 2], "holds a list"),
        ({"weights": {"a": torch.ones(1)}, "epoch": 1}, "its keys are 'weights', 'epoch'"),
        ({"state": {0: {}}, "param_groups": [{"params": [1]}]}, "state of 0, which is in none of its groups"),
        ({"state": {}, "param_groups": [{"params": [1, 1]}]}, "twice"),
        ({"a": torch.ones(2, 2).to_sparse()}, "sparse"),
    ],
)
def test_files_of_something_else_are_refused(value: Any, words: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(muster.Error, match=words):
        convert(tmp_path / "x.pt")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole, module = io.BytesIO(), build()
    torch.save(module.state_dict(), whole)
    for number, content in enumerate((b"", b"hello world", whole.getvalue()[:700], b"PK\x03\x04" + bytes(50))):
        file = tmp_path / f"{number}.pt"
        file.write_bytes(content)
        with pytest.raises(muster.CheckpointError, match=r"\d.pt'"):
            convert(file)
    changed = bytearray(whole.getvalue())
    changed[changed.index(module.state_dict()["0.weight"].numpy().tobytes())] ^= 1
    (tmp_path / "5.pt").write_bytes(changed)
    with pytest.raises(muster.CheckpointError, match=r"checksum of '.*data/0' in '.*5.pt' is wrong"):
        convert(tmp_path / "5.pt")
    dcp.save({"model": module.state_dict()}, checkpoint_id=tmp_path / "dcp")
    (part,) = (tmp_path / "dcp").glob("*.distcp")
    changed = bytearray(part.read_bytes())
    changed[changed.index(module.state_dict()["0.weight"].numpy().tobytes())] ^= 1
    part.write_bytes(changed)
    with pytest.raises(muster.CheckpointError, match=r"checksum of '.*data/0' in '.*distcp.*' is wrong"):
        convert(tmp_path / "dcp")
    (tmp_path / "folder").mkdir()
    with pytest.raises(muster.CheckpointError, match=r"no folder of torch\.distributed"):
        convert(tmp_path / "folder")


def test_what_a_checkpoint_cannot_hold_is_left_out_and_said(tmp_path: Path) -> None:
    torch.save({"model": build().state_dict(), "seen": {1, 2}, "epoch": 3}, tmp_path / "a.pt")
    code, _, error = run("convert", tmp_path / "a.pt", tmp_path / "target")
    assert code == 0 and "'seen' is left out" in error
    with mirrored() as strategy:
        strategy.prepare(build())
        assert strategy.load(tmp_path / "target") == {"epoch": 3}


def test_a_file_that_ends_the_process_that_reads_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(build().state_dict(), tmp_path / "a.pt")
    program = tmp_path / "dies"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    code, _, error = run("convert", tmp_path / "a.pt", tmp_path / "target")
    assert code == 1 and "SIGSEGV" in error and "a.pt" in error


# --- several workers --------------------------------------------------------------------------------------------------
def loaded_by_a_rank(folder: str) -> list[Any]:
    torch.manual_seed(int(os.environ["RANK"]))
    with muster.MultiWorkerMirroredStrategy.from_env(seed=7, threads_per_replica=1, timeout=60.0) as strategy:
        job = Job(strategy)
        found = strategy.load(folder)
        weights, packed = job.state()
        moments = packed["state"][0]["exp_avg"].tolist()
        return [found, {n: value.tolist() for n, value in weights.items()}, moments, strategy.seed, strategy.steps]


def test_every_worker_gets_what_was_converted(tmp_path: Path) -> None:
    module, user = stepped()
    torch.save({"model": module.state_dict(), "optimizer": user.state_dict(), "epoch": 3}, tmp_path / "all.pt")
    moments = user.state_dict()["state"][0]["exp_avg"].tolist()
    expected = [{"epoch": 3}, {n: value.tolist() for n, value in module.state_dict().items()}, moments, 7, 0]
    assert run_ranks(2, loaded_by_a_rank, str(convert(tmp_path / "all.pt"))) == [expected, expected]


def test_what_is_no_file_of_torch_is_said_to_be_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(7)\n")
    with pytest.raises(muster.CheckpointError, match=r"train\.py' is no file of torch\.save, torch::save"):
        convert(script)
    for protocol in (2, 3):
        old = tmp_path / f"old{protocol}.pt"
        torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        convert(old)
