"""A step captured in a CUDA graph replays as if it were taken again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_training import Training, batches, flat

import muster

WARM_STEPS = 4
REPLAYS = 10


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 0.1}, {"precision": "fp16", "clip_norm": 1.0}, {"precision": "bf16"}],
    ids=str,
)
def test_replays_learn_as_steps_do(gpu: torch.device, options: dict[str, Any]) -> None:
    data = batches(WARM_STEPS + REPLAYS + 1, gpu)[:-1]  # all of one shape
    with muster.MirroredStrategy([str(gpu)], **options) as strategy:
        taken = Training(strategy, gpu)
        losses = [float(taken.step(x, y).loss) for x, y in data]
        expected = flat(taken.module)

    with muster.MirroredStrategy([str(gpu)], **options) as strategy:
        training = Training(strategy, gpu)
        x, y = (torch.empty_like(t) for t in data[0])
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for batch in data[:WARM_STEPS]:
                x.copy_(batch[0])
                y.copy_(batch[1])
                training.step(x, y)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            result = training.step(x, y)
        replayed = []
        for batch in data[WARM_STEPS:]:
            x.copy_(batch[0])
            y.copy_(batch[1])
            graph.replay()
            replayed.append(float(result.loss))
        assert replayed == losses[WARM_STEPS:]
        assert torch.equal(flat(training.module), expected)
        del graph
