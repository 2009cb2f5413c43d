# SPDX-License-Identifier: Apache-2.0
"""Full supervised fine-tuning of a Llama-class model with DistributedDataParallel.

    torchrun --nproc-per-node 2 -m deepytorch.recipes.llama_sft steps=40
    torchrun --nproc-per-node 2 -m deepytorch.recipes.llama_sft --compare
    torchrun --nproc-per-node 8 -m deepytorch.recipes.llama_sft \\
        model=meta-llama/Llama-3.2-1B data=alpaca.json precision=bf16 max_length=1024

Without ``model=`` and ``data=`` it trains a small Llama on the standard library's docstrings.
``--compare`` trains the stock stack and deepytorch side by side on the same data, seed and
initial weights. Options: configs/llama_sft.yaml. Read it from ``main`` downwards, copy, change.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from deepytorch.integrations.transformers import BATCH_KEY, IntegrationError, pack_batches
from deepytorch.recipes import _compare
from deepytorch.recipes._config import RecipeError, load_config, parse_arguments
from deepytorch.recipes._data import (
    Batch,
    InstructionPair,
    byte_tokenizer,
    encode_all,
    endless_batches,
    load_pairs,
)
from deepytorch.recipes._models import (
    load_model,
    load_tokenizer,
    print_sample,
    save_checkpoint,
)
from deepytorch.recipes._run import (
    Process,
    ScalarLog,
    StepProgress,
    choose_device,
    console,
    distributed,
    make_run_dir,
    say_error,
    stock_backend,
    wait_for_all,
)

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "llama_sft.yaml"


@dataclass(frozen=True)
class Config:
    """The options; configs/llama_sft.yaml says what each one means."""

    name: str = "llama_sft"
    output_dir: str = "runs"
    backend: Literal["deepytorch", "stock"] = "deepytorch"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 42
    model: str | None = None
    hidden_size: int = 256
    intermediate_size: int = 688
    num_layers: int = 4
    num_heads: int = 4
    data: str | None = None
    max_length: int = 512
    steps: int = 50
    batch_size: int = 4
    accumulation: int = 1
    learning_rate: float | None = None
    warmup_steps: int = 5
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    padding_free: Literal["auto", "on", "off"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    sample_tokens: int = 120
    loss_tolerance: float = 1e-4

    def __post_init__(self) -> None:
        positive = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "max_length")
        for key in (*positive, "steps", "batch_size", "accumulation", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise RecipeError(f"{key} must be greater than 0, not {getattr(self, key)}")
        if self.hidden_size % (2 * self.num_heads):
            raise RecipeError(
                f"hidden_size={self.hidden_size} must be a multiple of 2 * num_heads "
                f"({2 * self.num_heads}), so that every head has an even size"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe: 0 done, 1 --compare found a difference, 2 bad options or data."""
    arguments = parse_arguments(argv, recipe="llama_sft", default=DEFAULT_CONFIG)
    try:
        config = load_config(Config, arguments.config, arguments.overrides)
        device = choose_device(config.device)
        # Neither arm of a comparison uses the default group: it only carries barriers and losses.
        stock = "gloo" if arguments.compare else stock_backend(device)
        backend = stock if arguments.compare or config.backend == "stock" else "deepytorch"
        with distributed(backend, device) as process:
            return compare(config, process) if arguments.compare else train(config, process)
    except RecipeError as error:
        return say_error("llama_sft", error)


def train(config: Config, process: Process) -> int:
    """Train once on ``config.backend``, save the checkpoint and print a sample."""
    tokenizer, batches, held_out = prepare_data(config, process)
    padding_free = "off" if config.backend == "stock" else config.padding_free
    trainer = Trainer(config, tokenizer, process, group=None, padding_free=padding_free)
    run_dir = make_run_dir(config.output_dir, config.name) if process.is_main else None
    log = ScalarLog(run_dir and run_dir / "tensorboard")
    with StepProgress(config.steps, enabled=process.is_main) as progress:
        for step in range(1, config.steps + 1):
            start = time.perf_counter()
            result = trainer.step([next(batches) for _ in range(config.accumulation)])
            dist.all_reduce(result.loss_share)
            loss = result.loss_share.item()  # waits for the device: the time below is whole
            seconds = time.perf_counter() - start
            speed = result.num_tokens.item() / seconds
            progress.update(step, f"loss {loss:.4f}  {speed:,.0f} tokens/s")
            log.write(
                step,
                loss=loss,
                learning_rate=result.learning_rate,
                tokens_per_s=speed,
                step_time_s=seconds,
            )
    log.close()
    if run_dir:
        save_checkpoint(trainer.model, tokenizer, run_dir / "checkpoint")
        print_sample(trainer.model, tokenizer, held_out, config.sample_tokens)
        console.print(f"checkpoint  {run_dir / 'checkpoint'}", highlight=False)
        console.print(f"scalars     {run_dir / 'tensorboard'}", highlight=False)
    wait_for_all(process)  # the others wait for the sample before the group goes away
    return 0


def compare(config: Config, process: Process) -> int:
    """Train the stock stack and deepytorch, step by step in turn, and print the differences."""
    stock_group = dist.new_group(backend=stock_backend(process.device), group_desc="stock arm")
    our_group = dist.new_group(backend="deepytorch", group_desc="deepytorch arm")
    tokenizer, batches, held_out = prepare_data(config, process)
    stock = Trainer(config, tokenizer, process, group=stock_group, padding_free="off")
    ours = Trainer(config, tokenizer, process, group=our_group, padding_free=config.padding_free)
    run_dir = make_run_dir(config.output_dir, config.name) if process.is_main else None
    logs = {arm: ScalarLog(run_dir and run_dir / "tensorboard" / arm) for arm in _compare.ARMS}
    comparison = _compare.Comparison(
        backends={"stock": dist.get_backend(stock_group), "ours": dist.get_backend(our_group)}
    )
    with StepProgress(config.steps, enabled=process.is_main) as progress:
        for step in range(1, config.steps + 1):
            micro_batches = [next(batches) for _ in range(config.accumulation)]
            for arm in _compare.order_of(step):
                trainer = stock if arm == "stock" else ours
                torch.manual_seed(config.seed + step)  # both arms see the same dropout
                with _compare.timed(process.device) as timer:
                    result = trainer.step(micro_batches)
                loss = result.loss_share.cpu()
                dist.all_reduce(loss)
                comparison.add(arm, loss.item(), timer.seconds, int(result.num_tokens.item()))
                logs[arm].write(step, **comparison.last(arm))
            progress.update(step, comparison.progress_text())
    if run_dir:
        for log in logs.values():
            log.close()
        save_checkpoint(ours.model, tokenizer, run_dir / "checkpoint")
        print_sample(ours.model, tokenizer, held_out, config.sample_tokens)
        _compare.write_results(comparison, run_dir, asdict(config), process)
        _compare.print_table(comparison, run_dir, config.loss_tolerance)
    verdict = comparison.verdict(config.loss_tolerance)
    if process.is_main and verdict is not None:
        sys.stderr.write(f"llama_sft: {verdict}\n")
    dist.barrier()
    return 0 if verdict is None else 1


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step leaves behind."""

    loss_share: torch.Tensor  # float32 scalar; its sum over the ranks is the mean loss per token
    num_tokens: torch.Tensor  # float32 scalar; tokens of all ranks, without padding
    learning_rate: float


class Trainer:
    """A model in DDP over one process group, its optimizer and its schedule."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        process: Process,
        *,
        group: dist.ProcessGroup | None,
        padding_free: str,
    ) -> None:
        self.config, self.process, self.group = config, process, group
        torch.manual_seed(config.seed)  # every trainer starts from the same weights
        self.model = build_model(config, tokenizer).to(process.device)
        self.model.train()
        self.ddp = DistributedDataParallel(
            self.model,
            device_ids=[process.device] if process.device.type == "cuda" else None,
            process_group=group,
            gradient_as_bucket_view=True,
        )
        self.packs = packs_batches(self.ddp, padding_free)
        # A model from scratch learns from large steps; a trained one forgets with them.
        learning_rate = config.learning_rate or (2e-5 if config.model else 2e-3)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimizer, config.warmup_steps, config.steps
        )

    def step(self, micro_batches: list[Batch]) -> StepResult:
        """One optimizer step on this rank's micro-batches."""
        # The loss is a mean over the tokens of all ranks and micro-batches, so their number is
        # agreed first: averaging per rank would give tokens in short batches more weight.
        micro_batches = [batch.to(self.process.device) for batch in micro_batches]
        counts = torch.stack([batch.counts() for batch in micro_batches]).sum(dim=0)
        dist.all_reduce(counts, group=self.group)

        learning_rate = self.schedule.get_last_lr()[0]
        loss_share = torch.zeros((), device=self.process.device)
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self.ddp.no_sync():
                share = self.loss_share(batch, counts[0])
                # DDP averages gradients over the ranks, and the shares are to be summed.
                torch.autograd.backward(share * self.process.world_size)
            loss_share += share.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        return StepResult(loss_share, counts[1], learning_rate)

    def loss_share(self, batch: Batch, num_targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the next token over the answers' tokens of the batch: sum / number."""
        bf16 = self.config.precision == "bf16"
        plan = {BATCH_KEY: batch.packing} if self.packs else {}
        with torch.autocast(self.process.device.type, dtype=torch.bfloat16, enabled=bf16):
            # The model's own loss in place of one made of its logits: without padding nobody
            # needs logits of [batch, longest, vocabulary].
            loss: torch.Tensor = self.ddp(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                labels=batch.labels,
                num_items_in_batch=num_targets,
                use_cache=False,
                **plan,
            ).loss
        return loss


def packs_batches(model: Any, padding_free: str) -> bool:
    """Whether ``model`` trains without padding from now on."""
    try:
        return pack_batches(model, padding_free)
    except IntegrationError as error:
        raise RecipeError(str(error)) from error


def prepare_data(config: Config, process: Process) -> tuple[Any, Iterator[Batch], InstructionPair]:
    """The tokenizer, this rank's endless batches, and one pair kept out of training."""
    tokenizer = load_tokenizer(config.model) if config.model else byte_tokenizer()
    pairs = load_pairs(config.data)
    random.Random(config.seed).shuffle(pairs)
    held_out, *trained = pairs if len(pairs) > 1 else pairs * 2
    examples, summary = encode_all(trained, tokenizer, config.max_length)
    if process.is_main:
        console.print(f"data        {summary}", markup=False, highlight=False)
    batches = endless_batches(
        examples,
        tokenizer.pad_token_id,
        batch_size=config.batch_size,
        rank=process.rank,
        world_size=process.world_size,
        seed=config.seed,
    )
    return tokenizer, batches, held_out


def build_model(config: Config, tokenizer: Any) -> Any:
    """The checkpoint in ``config.model``, or a small Llama with random weights."""
    if config.model:
        return load_model(config.model, tokenizer)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            max_position_embeddings=config.max_length + config.sample_tokens,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
