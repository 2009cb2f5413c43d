"""Test how real tokens of public scripts are counted and told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from deepytorch.workloads.scripts import SCRIPTS
from deepytorch_core.base.patching import Patches
from deepytorch_core.compare.result import Sample
from deepytorch_core.compare.script_rates import Rates, told
from deepytorch_core.compare.tokens import TokenCount, TokenCounter, count

SAMPLE = Sample(
    **{"arm": "stock", "steps": 9, "is_complete": True, "block_s": (0.5, 1.5), "setup_s": 1.0},
    **{"losses": (), "peak_bytes": 2**31, "device": "cpu", "redirected": (), "made_folders": ()},
    **{"seams": (), "native_calls": 0, "decisions": ()},
    clock={"busy_share": 0.5, "tokens": {"tokens": 1_000, "pairs": 50_000}},
)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def test_padding_is_no_token() -> None:
    batch = {"input_ids": ids([1, 2, 3], [4, 0, 0]), "attention_mask": ids([1, 1, 1], [1, 0, 0])}
    assert count(batch) == TokenCount(tokens=4, pairs=9 + 1)


def test_packed_rows_end_where_positions_begin_anew() -> None:
    batch = {"input_ids": ids([1, 2, 3, 4, 5]), "position_ids": ids([0, 1, 2, 0, 1])}
    assert count(batch) == TokenCount(tokens=5, pairs=9 + 4)


def test_full_rows_need_no_mask_and_images_are_no_tokens() -> None:
    assert count({"input_ids": ids([1, 2], [3, 4])}) == TokenCount(tokens=4, pairs=8)
    assert count({"pixel_values": ids([1])}) is None
    assert count([ids([1])]) is None


def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.arange(number, device="cpu")} for number in range(1, 9)]


def test_steps_have_the_tokens_of_their_micro_batches() -> None:
    patches, counter = Patches(), TokenCounter()
    counter.install(patches)
    try:
        for _ in DataLoader(rows(), batch_size=1):  # type: ignore[arg-type]
            pass
    finally:
        patches.undo()
    assert counter.of_steps(range(1, 3), 2) == TokenCount(3 + 4 + 5 + 6, 9 + 16 + 25 + 36)
    assert counter.of_steps(range(3, 4), 2) == TokenCount(7 + 8, 49 + 64)
    assert counter.of_steps(range(3, 5), 2) is None
    assert counter.of_steps(range(0), 2) is None
    for _ in DataLoader(rows(), batch_size=1):  # type: ignore[arg-type]
        pass
    assert counter.of_steps(range(4, 5), 2) is None


def test_rates_are_of_all_timed_steps() -> None:
    rates = Rates(work=(6e9, 1e6), matrix_rate=1e13, peer=("packed", ("--packing=True",), SAMPLE))
    faster = dataclasses.replace(SAMPLE, block_s=(0.25, 0.25))
    found = rates.of_arms({"stock": [SAMPLE], "ours": [faster], "second": [faster, SAMPLE]})
    assert found is not None
    assert found["matrix_tflops"] == 10.0
    share = (6e9 * 1_000 + 1e6 * 50_000) / 2.0 / 1e13
    assert found["stock"] == {
        **{"per_s": 500.0, "per_step": 500.0},
        "matrix_share": pytest.approx(share, abs=1e-4),
    }
    assert found["ours"]["per_s"] == 2_000.0
    assert found["second"]["per_s"] == 800.0
    peer = rates.of_peer()
    assert peer is not None
    assert peer["ms"] == [750.0, 1_000.0, 1_250.0]
    assert (peer["peak_gib"], peer["tokens"]["per_s"]) == (2.0, 500.0)
    said = told({"tokens": found, "peer": peer})
    assert said.startswith("real tokens/s: 500 stock, 2,000 ours, 800 again, 500 packed, ")


def test_rates_need_tokens_of_every_run() -> None:
    blind = dataclasses.replace(SAMPLE, clock={"tokens": None})
    assert Rates().of_arms({"stock": [SAMPLE], "ours": [blind], "second": [SAMPLE]}) is None
    assert Rates().of_peer() is None
    assert told({"tokens": None, "peer": None}) == ""
    unknown: Any = Rates().of_arms({"stock": [SAMPLE]})
    assert unknown["stock"]["matrix_share"] is None


# Weights that multiply, as published, without the embeddings: in billions.
WEIGHTS = {
    **{"trl-sft-llama-8b-lora": 7.5, "trl-sft-qwen3-8b-lora": 7.57, "trl-sft-gemma3-4b": 3.88},
    # 3.6 billion of gpt-oss-20b are active with 24 layers, 0.58 of them its head.
    "trl-sft-gpt-oss-20b-6-layers": 0.58 + 6 / 24 * 3.02,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_work_counts_the_weights_that_multiply(name: str) -> None:
    work = SCRIPTS[name].work
    assert work is not None
    per_weight = 4 if "lora" in name else 6
    assert work.of_token == pytest.approx(per_weight * WEIGHTS[name] * 1e9, rel=0.05)
