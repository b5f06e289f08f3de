"""Tests that need a GPU; `make gpu-check` runs them. `--device cpu` checks the tests themselves where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"], help="what kernels and replicas run on")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where kernels and replicas run."""
    chosen = torch.device(request.config.getoption("--device"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    yield torch.device("cuda", 0) if chosen.type == "cuda" else chosen
    if chosen.type == "cuda":
        torch.cuda.synchronize()


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU; without one the test has nothing to look at."""
    if device.type != "cuda":
        pytest.skip("there is no GPU")
    return device
