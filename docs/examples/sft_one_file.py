"""Fine-tunes a causal language model on your own text, in one file that is made to be copied.

Each line of the data is a JSON object with `messages` (a chat), `prompt` and `completion`, or
`text`. Chats and completions are trained on the last answer alone.

    python docs/examples/sft_one_file.py --model Qwen/Qwen3-0.6B --data train.jsonl --out tuned
    deepytorch run --nproc-per-node 8 docs/examples/sft_one_file.py ... # a copy on each GPU
    deepytorch run --nproc-per-node 8 docs/examples/sft_one_file.py ... --shard # FSDP2

A run that was ended goes on from its last checkpoint when it is started again. `tuned` is a model
that transformers loads, `tuned/metrics.jsonl` has a line for each logged step.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

# The one line. It compiles, packs rows without padding, fuses kernels and optimizer, and takes the
# collectives over, each where it is measured to be right and faster. All else here is plain torch.
import deepytorch

IGNORED = -100  # the label of what is not trained


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model.")
    add = parser.add_argument
    add("--model", required=True, help="a folder, or a name on the Hugging Face Hub")
    add("--data", type=Path, required=True, help="a file of JSON lines")
    add("--out", type=Path, required=True, help="the folder of the tuned model")
    add("--epochs", type=int, default=3, help="times that the data is gone through")
    add("--rows", type=int, default=8, help="rows of a micro-batch")
    add("--accumulate", type=int, default=1, help="micro-batches of a step, on each rank")
    add("--length", type=int, default=2048, help="most tokens of a row; what is longer is cut")
    add("--lr", type=float, default=2e-5, help="the highest learning rate")
    add("--warmup", type=float, default=0.03, help="part of the steps in which it rises")
    add("--held-out", type=float, default=0.02, help="part of the rows that is evaluated")
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--log-every", type=int, default=10, help="steps between two lines of metrics")
    add("--save-every", type=int, default=500, help="steps between two checkpoints")
    add("--seed", type=int, default=0)
    add("--shard", action="store_true", help="spread weights over the ranks (FSDP2)")
    add("--checkpointing", action="store_true", help="compute activations again to save memory")
    return parser.parse_args()


# --- Data ------------------------------------------------------------------------------------


def encoded(line: str, tokenizer: Any, length: int) -> tuple[list[int], list[int]]:
    """Token ids and labels of one line."""
    row = json.loads(line)
    if "messages" in row:
        chat = row["messages"]
        prompt = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, tokenize=False
        )
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        if not whole.startswith(prompt):
            raise ValueError("the chat template changes a question once it is answered")
        answer = whole[len(prompt) :]
    elif "completion" in row:
        prompt, answer = row["prompt"], row["completion"] + tokenizer.eos_token
    else:
        prompt, answer = "", row["text"] + tokenizer.eos_token
    # Apart, so that no token is of both.
    asked = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    answered = tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = [*asked, *answered][:length]
    return ids, [*([IGNORED] * len(asked)), *answered][:length]


def read(path: Path, tokenizer: Any, length: int) -> list[tuple[list[int], list[int]]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                ids, labels = encoded(line, tokenizer, length)
            except (KeyError, TypeError, ValueError) as error:
                raise SystemExit(f"{path}:{number}: {type(error).__name__}: {error}") from None
            if any(label != IGNORED for label in labels[1:]):
                rows.append((ids, labels))
    if not rows:
        raise SystemExit(f"{path}: no line has anything to train on within {length} tokens")
    return rows


def collated(rows: list[Any], padding: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Rows filled up to the longest; the padding is not computed, see `deepytorch.report()`."""
    width = max(len(ids) for ids, _ in rows)
    batch = {
        "input_ids": [ids + [padding] * (width - len(ids)) for ids, _ in rows],
        "attention_mask": [[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows],
        "labels": [labels + [IGNORED] * (width - len(labels)) for _, labels in rows],
    }
    on_host = {name: torch.tensor(column) for name, column in batch.items()}
    if device.type == "cuda":
        on_host = {name: tensor.pin_memory() for name, tensor in on_host.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in on_host.items()}


def steps_of(rows: list[Any], args: argparse.Namespace, epoch: int) -> Iterator[list[list[Any]]]:
    """The micro-batches of each step of this rank. All ranks take as many, of as many rows."""
    generator = torch.Generator().manual_seed(args.seed + epoch)
    order = torch.randperm(len(rows), generator=generator).tolist()
    world, rank = world_size(), global_rank()
    own = order[rank : len(order) // world * world : world]
    micro = [own[i : i + args.rows] for i in range(0, len(own), args.rows)]
    for i in range(0, len(micro), args.accumulate):
        yield [[rows[index] for index in several] for several in micro[i : i + args.accumulate]]


# --- Ranks -----------------------------------------------------------------------------------


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def global_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def summed(*values: float, device: torch.device) -> list[float]:
    """The sums of numbers over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


# --- Model -----------------------------------------------------------------------------------


def built(args: argparse.Namespace, device: torch.device) -> Any:
    # Weights in float32, which small updates need; what is computed is in bfloat16 on GPUs.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    model.config.use_cache = False
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not dist.is_initialized():
        return model
    if not args.shard:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        reduce_dtype=torch.float32,
    )
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def loss_sum(model: Any, batch: dict[str, torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    """The batch's part of the mean over the `items` targets of all ranks' step."""
    with torch.autocast(batch["labels"].device.type, torch.bfloat16, enabled=items.is_cuda):
        # Gradients are averaged over ranks, so each rank's part counts as often.
        return model(**batch, num_items_in_batch=items).loss * world_size()


def num_targets(rows: list[Any]) -> int:
    return sum(label != IGNORED for _, labels in rows for label in labels[1:])


@torch.no_grad()
def evaluated(model: Any, rows: list[Any], padding: int, args: Any, device: Any) -> float:
    """The mean loss of the rows that are held out."""
    model.eval()
    sums = [0.0, 0.0]
    own = rows[global_rank() :: world_size()]
    # As many passes on each rank, or sharded weights would be waited for.
    passes = math.ceil(math.ceil(len(rows) / world_size()) / args.rows)
    for i in range(passes):
        several = own[i * args.rows : (i + 1) * args.rows]
        items = torch.tensor(max(1, num_targets(several)), device=device)
        loss = loss_sum(model, collated(several or rows[:1], padding, device), items)
        if several:
            sums[0] += loss.item() * items.item() / world_size()
            sums[1] += items.item()
    model.train()
    total, number = summed(*sums, device=device)
    return total / max(1.0, number)


# --- Checkpoints -----------------------------------------------------------------------------


def save(folder: Path, model: Any, optimizer: Any, step: int) -> None:
    """Write a checkpoint; it counts once its name is complete."""
    weights, states = get_state_dict(model, optimizer)
    begun, done = folder / f"step-{step}.part", folder / f"step-{step}"
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=begun)
    if global_rank() == 0:
        begun.rename(done)
        for old in folder.glob("step-*"):
            if old != done:
                for file in [*old.iterdir()]:
                    file.unlink()
                old.rmdir()
    if dist.is_initialized():
        dist.barrier()


def resumed(folder: Path, model: Any, optimizer: Any) -> int:
    """Load the last checkpoint, if there is one; returns its step."""
    found = {
        int(path.name[5:]): path for path in folder.glob("step-*") if path.name[5:].isdecimal()
    }
    if not found:
        return 0
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=found[max(found)])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return max(found)


# --- Training --------------------------------------------------------------------------------


def main() -> None:
    args = arguments()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    device = torch.device("cuda" if on_gpu else "cpu")
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    torch.manual_seed(args.seed)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    rows = read(args.data, tokenizer, args.length)
    held_out = rows[: int(args.held_out * len(rows))]
    rows = rows[len(held_out) :]
    if len(rows) < world_size():
        raise SystemExit(f"{args.data}: {len(rows)} rows are too few for {world_size()} ranks")

    model = built(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    per_epoch = sum(1 for _ in steps_of(rows, args, 0))
    total = args.epochs * per_epoch
    scheduler = get_scheduler("cosine", optimizer, math.ceil(args.warmup * total), total)
    checkpoints = args.out / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    first = resumed(checkpoints, model, optimizer)
    for _ in range(first):
        scheduler.step()
    if global_rank() == 0:
        part = 100 * args.rows * args.accumulate * world_size() / len(rows)
        print(f"{total} steps, each {part:.2g} % of {len(rows)} rows; from step {first}")

    step, tokens, began = 0, 0, time.perf_counter()
    model.train()
    for epoch in range(args.epochs):
        for micro in steps_of(rows, args, epoch):
            step += 1
            if step <= first:
                continue
            (number,) = summed(sum(map(num_targets, micro)), device=device)
            items = torch.tensor(int(number), device=device)
            losses = []
            for place, several in enumerate(micro):
                is_last = place == len(micro) - 1
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = is_last
                elif args.shard and dist.is_initialized():
                    model.set_requires_gradient_sync(is_last)
                loss = loss_sum(model, collated(several, padding, device), items)
                loss.backward()
                losses.append(loss.detach())
                tokens += sum(len(ids) for ids, _ in several)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            norm = norm.full_tensor() if args.shard and dist.is_initialized() else norm
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)

            if step % args.log_every == 0 or step == total:
                # Reading a number waits for the GPU, so it is done now and then.
                mean, seen = summed(
                    torch.stack(losses).sum().item() / world_size(), tokens, device=device
                )
                line = {
                    "step": step,
                    "epoch": round(step / per_epoch, 3),
                    "loss": round(mean, 5),
                    "grad_norm": round(norm.item(), 5),
                    "lr": scheduler.get_last_lr()[0],
                    "tokens_per_s": round(seen / (time.perf_counter() - began)),
                }
                if held_out and step == total:
                    line["held_out_loss"] = round(
                        evaluated(model, held_out, padding, args, device), 5
                    )
                if global_rank() == 0:
                    print(line, flush=True)
                    with (args.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                tokens, began = 0, time.perf_counter()
            if step % args.save_every == 0:
                save(checkpoints, model, optimizer, step)

    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if global_rank() == 0:
        inner = getattr(model, "module", model)
        inner.config.use_cache = True
        inner.save_pretrained(args.out, state_dict=whole)
        tokenizer.save_pretrained(args.out)
        print(deepytorch.report())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
