"""Benchmarks that take turns: several warm up together, and each is timed alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from deepytorch_core.bench import quiet


def test_several_warm_up_together_and_none_while_one_is_timed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with ThreadPoolExecutor() as pool, quiet.turns(path) as timed:
        with quiet.turns(path) as first, quiet.turns(path) as second:
            first.warm_up()
            second.warm_up()
            timed.warm_up()
            alone = pool.submit(timed.time)
            assert not wait([alone], timeout=0.2).done
            first.warm_up()  # already in it: no wait for who waits for it
        alone.result(timeout=30)
        with quiet.turns(path) as late:
            begun = pool.submit(late.warm_up)
            assert not wait([begun], timeout=0.2).done
            timed.warm_up()
            begun.result(timeout=30)


def test_each_of_many_is_timed_alone(tmp_path: Path) -> None:
    number, most = 0, 0
    guard = threading.Lock()

    def bench(_: int) -> None:
        nonlocal number, most
        with quiet.turns(tmp_path / "lock") as line:
            line.warm_up()
            line.time()
            with guard:
                number += 1
                most = max(most, number)
            threading.Event().wait(0.01)
            with guard:
                number -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(bench, range(24)))
    assert most == 1


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"), quiet.turns(tmp_path / "lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()
