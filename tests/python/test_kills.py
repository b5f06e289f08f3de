"""Jobs that are killed at random: checkpoints are there whole or not at all, and those that go on end with the bits of
one that nothing happened to."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from support.killed_jobs import Kills, with_seed

LAYOUTS = ["mirrored", "workers", "sharded-2", "divided-2", "dealt-2"]
"""Of the short tests: replicas in a process, workers, and workers with so many servers; batches that are each worker's
own, divided over the live, or dealt."""
POINTS = int(os.environ.get("MUSTER_KILLS", "26"))
"""Kills of each layout in the long test."""
SEED = int(os.environ.get("MUSTER_KILLS_SEED", "1"))


def killed(layout: str, folder: Path, points: int, per_chain: int, seed: int) -> None:
    def act() -> None:
        kills = Kills(layout, folder, seed)
        for number in itertools.count():
            if kills.points == points:
                break
            kills.chain(f"chain-{number}", min(per_chain, points - kills.points))
        print(f"{layout}: {kills.points} kills, which left {dict(kills.found)}")

    with_seed(seed, act)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_job_that_is_killed_again_and_again_ends_as_if_it_had_not_been(layout: str, tmp_path: Path) -> None:
    killed(layout, tmp_path, 3, 3, SEED)


@pytest.mark.parametrize("layout", ["divided-2", "dealt-2"])
def test_a_worker_that_is_killed_comes_again_and_no_sample_is_lost(layout: str, tmp_path: Path) -> None:
    with_seed(SEED, lambda: Kills(layout, tmp_path, SEED).joining("joining", 1))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [*LAYOUTS, "sharded-1", "sharded-3"])
def test_jobs_that_are_killed_at_many_points(layout: str, tmp_path: Path) -> None:
    killed(layout, tmp_path, POINTS, 2, SEED + 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["divided-1", "divided-3", "dealt-2"])
def test_workers_that_are_killed_at_many_points_come_again(layout: str, tmp_path: Path) -> None:
    def act() -> None:
        kills = Kills(layout, tmp_path, SEED)
        for number in range(max(1, POINTS // 4)):
            kills.joining(f"joining-{number}", number % 2)
        print(f"{layout}: {kills.points} workers that came again")

    with_seed(SEED, act)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["workers", "divided-2", "sharded-1", "sharded-2", "sharded-3"])
def test_launched_jobs_that_are_killed_end_with_the_same_bits(layout: str, tmp_path: Path) -> None:
    def act() -> None:
        kills = Kills(layout, tmp_path, SEED)
        # The launcher, what starts the workers, a worker or all of them, servers, and everything.
        for victim in ("muster run", "muster.agent", "-u /", "muster serve", ""):
            if "serve" not in victim or layout != "workers":
                kills.launched(f"launched-{kills.points}", victim)
        print(f"{layout}: {kills.points} kills of a launched job, which left {dict(kills.found)}")

    with_seed(SEED, act)
