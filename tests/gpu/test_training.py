"""Training on one GPU: replicas of it agree with one replica, with torch's own loop and with the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_training import OPTIMIZERS, Trained, Training, batches, flat, net, train, train_with_torch, virtual
from torch import Tensor

import muster

STEPS = 20


def assert_close(found: Trained, expected: Trained, tolerance: float) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=tolerance, atol=tolerance)


def assert_equal(found: Trained, expected: Trained) -> None:
    assert torch.equal(found.losses, expected.losses)
    assert torch.equal(found.parameters, expected.parameters)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_two_virtual_replicas_learn_as_one(device: torch.device, optimizer: str) -> None:
    data = batches(STEPS, device)
    one = train(virtual(device, 1), data, optimizer)
    assert_close(train(virtual(device, 2), data, optimizer), one, 1e-5)
    assert one.losses[-3:].mean() < 0.9 * one.losses[:3].mean()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.1}, {"precision": "bf16"}, {"precision": "fp16"}, {"accumulate": 2}, {"wire": "bf16"}],
)
def test_a_run_repeats_bit_for_bit(device: torch.device, replicas: int, options: dict[str, Any]) -> None:
    data = batches(STEPS, device)
    first = train(virtual(device, replicas), data, **options)
    assert_equal(train(virtual(device, replicas), data, **options), first)
    assert not torch.equal(first.parameters, flat(net()))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_a_replica_learns_as_torch_does(device: torch.device, optimizer: str, clip_norm: float | None) -> None:
    data = batches(STEPS, device)
    expected = train_with_torch(device, data, optimizer, clip_norm)
    for fuse in (True, False):
        found = train(virtual(device, 1), data, optimizer, clip_norm=clip_norm, fuse=fuse)
        assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("model", ["batch norm", "attention"])
def test_models_learn_as_torch_has_them(device: torch.device, model: str) -> None:
    # By SGD: some of their gradients are 0 but for rounding, since a norm or a softmax takes them away, and Adam makes
    # steps of such.
    data = batches(STEPS, device)
    found = train(virtual(device, 1), data, "sgd", model)
    assert_close(found, train_with_torch(device, data, "sgd", model=model), 1e-4)


@pytest.mark.parametrize("model", ["batch norm", "attention"])
def test_models_repeat_bit_for_bit_on_two_replicas(device: torch.device, model: str) -> None:
    data = batches(STEPS, device)
    first = train(virtual(device, 2), data, model=model)
    assert_equal(train(virtual(device, 2), data, model=model), first)
    assert not torch.equal(first.parameters, flat(net(model)))


def test_batch_norms_buffers_are_the_means_of_the_replicas(device: torch.device) -> None:
    x, y = batches(3, device)[0]
    x, y = x[:60], y[:60]
    with muster.MirroredStrategy(virtual(device, 2)) as strategy:
        training = Training(strategy, device, model="batch norm")
        training.step(x, y)
        found = {name: buffer.clone() for name, buffer in training.module.named_buffers()}
    expected = []
    for half in (x[:30], x[30:]):
        module = net("batch norm").to(device)
        module(half)
        expected.append(dict(module.named_buffers()))
    assert found
    for name, buffer in found.items():
        one, other = (buffers[name].double() for buffers in expected)
        torch.testing.assert_close(buffer.double(), (one + other) / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}])
def test_the_gpu_learns_as_the_cpu_does(device: torch.device, options: dict[str, Any]) -> None:
    on_cpu = train(["cpu:0", "cpu:1"], batches(STEPS, "cpu"), **options)
    assert_close(train(virtual(device, 2), batches(STEPS, device), **options), on_cpu, 1e-4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_micro_batches_learn_as_their_whole(device: torch.device, replicas: int) -> None:
    data = batches(STEPS, device)
    pieces = [piece for x, y in data for piece in ((x[:20], y[:20]), (x[20:], y[20:]))]
    whole = train(virtual(device, replicas), data)
    found = train(virtual(device, replicas), pieces, accumulate=2)
    torch.testing.assert_close(found.parameters, whole.parameters, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.losses[1::2], whole.losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_low_precision_learns(device: torch.device, precision: str, replicas: int) -> None:
    data = batches(STEPS, device)
    found = train(virtual(device, replicas), data, precision=precision, loss_scale=muster.LossScale(init=1024.0))
    torch.testing.assert_close(found.losses, train_with_torch(device, data).losses, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_infinite_gradient_changes_nothing_but_the_scale(device: torch.device, replicas: int) -> None:
    (x, y), (x2, y2) = batches(3, device)[:2]
    options = {"precision": "fp16", "loss_scale": muster.LossScale(init=512.0)}
    with muster.MirroredStrategy(virtual(device, replicas), **options) as strategy:
        training = Training(strategy, device)
        assert not training.step(x, y).skipped
        before = flat(training.module)
        broken = x2.clone()
        broken[-1, 0] = torch.inf
        result = training.step(broken, y2)
        assert result.skipped
        assert float(result.loss_scale) == 256.0
        assert torch.equal(flat(training.module), before)
        after = training.step(x2, y2)
        assert not after.skipped
        assert not torch.equal(flat(training.module), before)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_loss_scale_follows_torchs_scaler(gpu: torch.device, replicas: int) -> None:
    data = batches(STEPS, gpu)[:-1]
    broken = {3, 4, 11}
    module = net().to(gpu)
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
    expected = []
    for i, (x, y) in enumerate(data):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(module(x * (torch.inf if i in broken else 1.0)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())

    scale = muster.LossScale(init=2.0**10, interval=3)
    with muster.MirroredStrategy(virtual(gpu, replicas), precision="fp16", loss_scale=scale) as strategy:
        training = Training(strategy, gpu)
        found = [
            float(training.step(x * (torch.inf if i in broken else 1.0), y).loss_scale) for i, (x, y) in enumerate(data)
        ]
    assert found == expected
    assert len(set(found)) > 2


def test_results_stay_on_the_device(device: torch.device) -> None:
    with muster.MirroredStrategy(virtual(device, 2), precision="fp16") as strategy:
        result = Training(strategy, device).step(*batches(2, device)[0])
        assert result.grad_norm is not None
        for value in (result.loss, result.weight, result.grad_norm, result.skipped, result.loss_scale):
            assert value.device.type == device.type
        assert float(result.weight) == len(batches(2, device)[0][0])


@pytest.mark.parametrize("replicas", [1, 2])
def test_kept_gradients_are_the_mean(device: torch.device, replicas: int) -> None:
    x, y = batches(2, device)[0]
    module = net().to(device)
    F.cross_entropy(module(x), y).backward()
    with muster.MirroredStrategy(virtual(device, replicas), keep_gradients=True, clip_norm=1e-3) as strategy:
        training = Training(strategy, device)
        training.step(x, y)
        for kept, expected in zip(training.module.parameters(), module.parameters(), strict=True):
            assert kept.grad is not None and expected.grad is not None
            torch.testing.assert_close(kept.grad, expected.grad, rtol=1e-5, atol=1e-6)


def test_metrics_are_averaged_by_weight(device: torch.device) -> None:
    x, y = batches(2, device)[0]
    with muster.MirroredStrategy(virtual(device, 2)) as strategy:
        training = Training(strategy, device)

        def loss(x: Tensor, y: Tensor) -> muster.Loss:
            logits = training.model(x)
            right = (logits.argmax(1) == y).float().mean()
            return muster.Loss(F.cross_entropy(logits, y), metrics={"accuracy": right})

        result = strategy.step(loss, x, y)
        expected = (net().to(device)(x).argmax(1) == y).float().mean()
        torch.testing.assert_close(float(result.metrics["accuracy"]), float(expected))


# --- several GPUs of one process ------------------------------------------------------------------------------------


@pytest.fixture
def gpus(gpu: torch.device) -> list[str]:
    """All of them."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("there is one GPU")
    return [f"{gpu.type}:{i}" for i in range(count)]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.1, "accumulate": 2}, {"precision": "fp16"}, {"keep_gradients": True}]
)
def test_gpus_learn_as_replicas_of_the_cpu(gpus: list[str], optimizer: str, options: dict[str, Any]) -> None:
    data = batches(STEPS, "cpu")
    expected = train(virtual(torch.device("cpu"), len(gpus)), data, optimizer, "wide", **options)
    assert_close(train(gpus, data, optimizer, "wide", **options), expected, 1e-2 if "precision" in options else 1e-4)


def test_gpus_repeat_bit_for_bit_and_as_the_first_one_steps(gpus: list[str]) -> None:
    data = batches(STEPS, gpus[0])
    divided = train(gpus, data, model="wide")
    assert_equal(train(gpus, data, model="wide"), divided)
    first = train(gpus, data, model="wide", keep_gradients=True)
    if len(gpus) == 2:
        assert_equal(first, divided)
    else:  # NCCL adds more than two in an order that depends on who gets the sum
        assert_close(first, divided, 1e-5)


def test_state_over_gpus_is_one_tensor_to_programs(gpus: list[str]) -> None:
    """Reads, copies and edits of what lies on several GPUs, whole and across their borders."""
    with muster.MirroredStrategy(gpus, seed=1) as strategy:
        training = Training(strategy, torch.device(gpus[0]), model="wide")
        for x, y in batches(3, gpus[0]):
            training.step(x, y)
        weight = next(training.module.parameters())
        moment = training.optimizer.state[weight]["exp_avg"]
        assert moment.device == weight.device
        before = moment.cpu()
        assert before.abs().sum() > 0
        torch.testing.assert_close(moment.clone().cpu(), before, rtol=0, atol=0)
        torch.testing.assert_close(moment.flatten()[3000:9000].cpu(), before.flatten()[3000:9000], rtol=0, atol=0)
        moment.mul_(2)
        torch.testing.assert_close(moment.cpu(), before * 2, rtol=0, atol=0)
        saved = training.optimizer.state_dict()["state"][0]["exp_avg"].to("cpu", copy=True)
        torch.testing.assert_close(saved, before * 2, rtol=0, atol=0)
        x, y = batches(1, gpus[0])[0]
        training.step(x, y)
        assert not torch.equal(moment.cpu(), before * 2)


def test_writes_to_data_reach_all_gpus(gpus: list[str]) -> None:
    with muster.MirroredStrategy(gpus, seed=1) as strategy:
        training = Training(strategy, torch.device(gpus[0]), model="wide")
        x, y = batches(1, gpus[0])[0]
        for _ in range(2):
            training.step(x, y)
        for parameter in training.module.parameters():
            parameter.data.zero_()
        # Of zeros the loss is the same for every class.
        assert training.step(x, y).loss.item() == pytest.approx(math.log(5))
