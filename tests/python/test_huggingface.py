"""Hugging Face's Trainer and Accelerate over muster.DistributedDataParallel train as over torch's."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import muster
from muster import huggingface
from support.ranks import run_ranks
from support.scripts import output_of

TORCH = nn.parallel.DistributedDataParallel
ROWS = 32
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "migrations" / "huggingface_digits.py"


def model() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    transformers.set_seed(1)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=3, **sizes)
    )


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(40, (ROWS, 7), generator=generator)
    return [{"input_ids": row, "labels": row.sum() % 3} for row in tokens]


def trainer(folder: Path, **options: Any) -> Any:
    plain = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", **options}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=2, learning_rate=1e-2, max_steps=6, seed=3, **plain
    )
    return transformers.Trainer(model(), arguments, train_dataset=samples(), eval_dataset=samples()[:9])


def finished(trainer: Any, **options: Any) -> dict[str, Any]:
    """What the Trainer has trained, and how it evaluates."""
    trainer.train(**options)
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return state | {"loss": trainer.evaluate()["eval_loss"]}


def compare_trainers(folder: Path, ways: dict[str, dict[str, Any]]) -> None:
    for name, options in ways.items():
        torchs = trainer(folder / f"torch, {name}", **options)
        expected = finished(torchs)
        assert type(torchs.model_wrapped) is TORCH

        ours = huggingface.use(trainer(folder / f"muster, {name}", **options))
        found = finished(ours)
        assert type(ours.model_wrapped) is muster.DistributedDataParallel
        assert ours.model_wrapped.reducer.num_averages == 6  # once a step, however many batches it adds up
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2 if "bf16" in options else 1e-4)


def resume(folder: Path) -> None:
    whole = huggingface.use(trainer(folder, save_strategy="steps", save_steps=3))
    whole.create_accelerator_and_postprocess()  # as for a trial of a search
    expected = finished(whole)
    dist.barrier()
    resumed = huggingface.use(trainer(folder))
    torch.testing.assert_close(finished(resumed, resume_from_checkpoint=str(folder / "checkpoint-3")), expected)
    assert type(whole.model_wrapped) is type(resumed.model_wrapped) is muster.DistributedDataParallel


def loop(accelerator: Any) -> tuple[dict[str, Tensor], type]:
    """As users of Accelerate write it."""
    data = TensorDataset(*(torch.stack([sample[key] for sample in samples()]) for key in ("input_ids", "labels")))
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    wrapped, optimizer, loader = accelerator.prepare(module, optimizer, DataLoader(data, batch_size=4))
    for tokens, labels in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(F.cross_entropy(wrapped(input_ids=tokens).logits, labels))
            accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(wrapped).state_dict(), type(wrapped)


def compare_accelerators() -> None:
    hook = accelerate.DistributedDataParallelKwargs(comm_hook=accelerate.utils.DDPCommunicationHookType.FP16)
    for handlers in ([], [hook]):
        both = [
            accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=handlers) for _ in range(2)
        ]
        expected, kind = loop(both[0])
        assert kind is TORCH
        found, kind = loop(huggingface.use(both[1]))
        assert kind is muster.DistributedDataParallel
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2 if handlers else 1e-4)
        with pytest.raises(muster.InvalidArgument, match=r"has prepared a model already.*before prepare"):
            huggingface.use(both[0])


def refuse_what_wraps_in_another_way() -> None:
    other = SimpleNamespace(prepare_model=TORCH)
    with pytest.raises(muster.InvalidArgument, match="this version of accelerate"):
        huggingface.use(other).prepare_model(nn.Linear(2, 2))


def run_example(folder: Path) -> None:
    printed = output_of(str(EXAMPLE), "--epochs", "8", "--output", str(folder))
    found = re.search(r"^test loss [\d.]+, accuracy ([\d.]+)$", printed, re.MULTILINE)
    assert (found is not None) == (dist.get_rank() == 0)
    if found is not None:
        assert "muster's DistributedDataParallel" in printed
        assert float(found[1]) > 0.5


def on_two_ranks(folder: Path) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    accumulating = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "ddp_bucket_cap_mb": 1}
    compare_trainers(folder, {"accumulating": accumulating, "bf16": {"bf16": True}})
    resume(folder / "resumed")
    compare_accelerators()
    refuse_what_wraps_in_another_way()
    run_example(folder / "example")
    assert nn.parallel.DistributedDataParallel is TORCH


def test_they_train_as_over_torchs(tmp_path: Path) -> None:
    run_ranks(2, on_two_ranks, tmp_path, timeout=280)


def test_only_those_are_taken() -> None:
    with pytest.raises(muster.InvalidArgument, match=r"takes a transformers\.Trainer or .* it got a Linear"):
        huggingface.use(nn.Linear(2, 2))


def test_the_page_shows_the_line_of_the_example() -> None:
    shown, page = EXAMPLE.read_text(), (ROOT / "docs" / "huggingface.md").read_text()
    for line in ("from muster import huggingface\n", "huggingface.use(trainer)\n", "trainer.train()\n"):
        assert line in shown
        assert line in page
