"""kernels in transformers models: stock losses, gradients and logits, every kind of head."""

from __future__ import annotations

import copy
import gc
import pickle
import types
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import deepytorch
from deepytorch.integrations import accelerate as accelerate_adapter
from deepytorch.integrations import transformers as transformers_adapter
from deepytorch.integrations.kernels import causal_loss, liger
from deepytorch_core.base import decisions
from deepytorch_core.nn.deferred_logits import DeferredLogits
from deepytorch_core.nn.kernels import KernelSetting, apply_kernels
from deepytorch_core.nn.weight_changes import steps

pytestmark = pytest.mark.usefixtures("quiet_profile")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "num_hidden_layers": 1}),
    "llama, tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", GROUPED),
    "gpt-neox": ("GPTNeoX", SIZES),
    "gemma 2 (scales its logits)": ("Gemma2", {**GROUPED, "pad_token_id": 0}),
}


def build(kind: str) -> Any:
    name, sizes = MODELS[kind]
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager")
    return getattr(transformers, f"{name}ForCausalLM")(settings).train()


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (3, 11), generator=generator)
    labels = ids.clone()
    labels[0, :4] = labels[2, 7:] = -100
    return {"input_ids": ids, "labels": labels}


def swap(model: Any, mode: str = "on") -> Any:
    return apply_kernels(KernelSetting(model=model, device=torch.device("cpu")), mode)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(ours: Any, stock: Any, **more: Any) -> Any:
    """Loss and gradients of a forward and backward pass; returns our output."""
    for model in (ours, stock):
        model.zero_grad()
    found, expected = ours(**batch(), **more), stock(**batch(), **more)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-7)
    found.loss.backward()
    expected.loss.backward()
    mine, theirs = gradients(ours), gradients(stock)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)
    return found


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "llama"])
def test_kernels_train_as_stock(kind: str) -> None:
    ours, stock = build(kind), build(kind)
    swapped = swap(ours)
    assert "chunked" in swapped.names.values()
    output = assert_same_training(ours, stock)
    assert isinstance(output.logits, DeferredLogits) == ("scales" not in kind)
    assert_same_training(ours, stock, num_items_in_batch=torch.tensor(41))
    # In evaluation, and with labels or without, there are the stock logits.
    for model in (ours, stock):
        model.eval()
    with torch.no_grad():
        found, expected = ours(**batch()), stock(**batch())
    assert type(found.logits) is torch.Tensor
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    prompt = batch()["input_ids"][:1, :5]
    generated = [
        model.generate(prompt, max_new_tokens=2, do_sample=False) for model in (ours, stock)
    ]
    assert torch.equal(*generated)
    swapped.undo()
    assert vars(ours).keys() == vars(stock).keys()
    assert not any("forward" in vars(module) for module in ours.modules())
    assert not ours._forward_pre_hooks
    assert not ours._forward_hooks


def step_hooks() -> int:
    return sum(hook is steps for hook in _global_optimizer_post_hooks.values())


def test_kernels_of_many_models_count_steps_by_one_hook() -> None:
    kept = [(model, swap(model)) for model in (build("llama") for _ in range(3))]
    assert step_hooks() == 1
    kept.pop()  # nobody undoes it
    gc.collect()
    while kept:
        assert step_hooks() == 1
        kept.pop()[1].undo()
    gc.collect()
    swapped = swap(build("llama"))
    assert step_hooks() == 1
    swapped.undo()


class Rotary(nn.Module):
    """A model that the replaced function of a Python module serves."""


def test_kernels_replace_rope_once_for_all_models_and_give_it_back() -> None:
    def stock(*given: Any) -> Any:
        return given

    space = types.SimpleNamespace(apply_rotary_pos_emb=stock)
    kernel = liger.LigerRope()
    models = [Rotary() for _ in range(3)]
    cpu = torch.device("cpu")
    undos = [kernel.apply(space, KernelSetting(model=model, device=cpu)) for model in models]
    ours = space.apply_rotary_pos_emb
    assert ours.__wrapped__ is stock
    assert liger._stock_of(ours) is stock
    undos[0]()
    undos[0]()
    models.pop()
    gc.collect()
    assert space.apply_rotary_pos_emb is ours
    undos[1]()
    assert space.apply_rotary_pos_emb is stock
    assert not liger._rotations
    undo = kernel.apply(space, KernelSetting(model=models[0], device=cpu))
    space.apply_rotary_pos_emb = print  # somebody else's, which stays
    undo()
    assert space.apply_rotary_pos_emb is print


def test_kernels_leave_the_logits_to_whoever_reads_them() -> None:
    ours, stock = build("llama, tied"), build("llama, tied")
    swap(ours)
    found, expected = ours(**batch()), stock(**batch())
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found["logits"].argmax(-1), expected["logits"].argmax(-1))
    assert type(ours(input_ids=batch()["input_ids"]).logits) is torch.Tensor, "no labels"
    # A custom loss on the logits of a call that had labels.
    for output in (ours(**batch()), stock(**batch())):
        (output.logits.square().mean() + output.loss).backward()
    mine, theirs = gradients(ours), gradients(stock)
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_kernels_say_when_logits_are_read_too_late() -> None:
    model = build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    swap(model)
    early, late = model(**batch()), model(**batch())
    early.loss.backward()
    assert early.logits.argmax(-1).shape == (3, 11), "between backward and step"
    optimizer.step()
    assert early.logits.argmax(-1).shape == (3, 11), "they were computed in time"
    with pytest.raises(RuntimeError, match=r"Read them before optimizer.step\(\)"):
        late.logits.sum()


def test_kernels_nobody_asked_for_give_logits_after_the_step_too() -> None:
    model, stock = build("llama"), build("llama")
    causal_loss.ChunkedLoss().apply(model, KernelSetting(model=model, device=torch.device("cpu")))
    head = vars(model.get_output_embeddings())["forward"]
    head.watches = 0
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.01) for network in (model, stock)]
    outputs = [network(**batch()) for network in (model, stock)]
    for output, optimizer in zip(outputs, optimizers, strict=True):
        output.loss.backward()
        optimizer.step()
    assert outputs[0].logits.sum().isfinite()
    assert head.dropped
    for network in (model, stock):
        network.zero_grad()
        output = network(**batch())
        output.logits.register_hook(lambda gradient: 2 * gradient)
        output.loss.backward()
    mine, theirs = gradients(model), gradients(stock)
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def test_kernels_leave_logits_readable_after_a_step_of_other_weights() -> None:
    model, other = build("llama"), nn.Linear(3, 3)
    mine = torch.optim.AdamW(model.parameters(), fused=True)
    others = torch.optim.AdamW(other.parameters(), fused=True)
    swap(model)

    def step(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    # It may hold copies that stand for the model's, until one has stepped that holds the model's.
    before = model(**batch())
    step(others)
    with pytest.raises(RuntimeError, match="the weights have changed since"):
        before.logits.sum()
    step(mine)
    after = model(**batch())
    step(others)
    assert after.logits.argmax(-1).shape == (3, 11)
    last = model(**batch())
    # As who shards an optimizer's state does: it steps copies from here on.
    for group in mine.param_groups:
        group["params"] = [parameter.detach().clone() for parameter in group["params"]]
    step(mine)
    with pytest.raises(RuntimeError, match="the weights have changed since"):
        last.logits.sum()


def test_kernels_auto_watches_a_pass_again_in_a_checkpoint_of_the_model() -> None:
    ours, stock = build("llama"), build("llama")
    causal_loss.ChunkedLoss().apply(
        ours, KernelSetting(model=ours, device=torch.device("cpu"), mode="auto")
    )
    ours(**batch())  # so that watching ends between a pass and its second time
    for step in range(causal_loss.WATCHED + 2):
        for model in (ours, stock):
            given = batch(step)
            loss = checkpoint(lambda m, g: m(**g).loss, model, given, use_reentrant=False)
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert isinstance(ours(**batch()).logits, DeferredLogits)


@pytest.mark.parametrize("reads", [False, True])
def test_kernels_auto_watches_whether_somebody_reads_the_logits(reads: bool) -> None:
    ours, stock = build("llama"), build("llama")
    setting = KernelSetting(model=ours, device=torch.device("cpu"), mode="auto")
    undo = causal_loss.ChunkedLoss().apply(ours, setting)
    forward = ours.lm_head.forward
    for step in range(causal_loss.WATCHED + 2):
        output = assert_same_training(ours, stock, num_items_in_batch=9)
        if reads and step == 1:
            torch.testing.assert_close(output.logits.detach(), stock(**batch()).logits.detach())
        for model in (ours, stock):
            torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert forward.dropped == reads
    assert (type(output.logits) is torch.Tensor) == reads
    if reads:
        (decision,) = decisions.made()
        assert decision["reason"] == "somebody reads the logits of training steps"
    undo()


def test_kernels_auto_leaves_a_head_whose_parameters_may_be_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    ours, stock = build("llama"), build("llama")
    setting = KernelSetting(model=ours, device=torch.device("cpu"), mode="auto")
    causal_loss.ChunkedLoss().apply(ours, setting)
    ours.lm_head.weight = nn.Parameter(ours.lm_head.weight.detach().clone())
    output = assert_same_training(ours, stock)
    assert type(output.logits) is torch.Tensor
    assert "sharded" in decisions.made()[-1]["reason"]


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_kernels_go_on_with_a_head_that_was_untied(mode: str) -> None:
    ours, stock = build("llama, tied"), build("llama, tied")
    setting = KernelSetting(model=ours, device=torch.device("cpu"), mode=mode)
    causal_loss.ChunkedLoss().apply(ours, setting)
    if mode == "auto":
        ours.lm_head.forward.watches = 0
    before = ours(**batch())
    for model in (ours, stock):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    after = assert_same_training(ours, stock)
    assert isinstance(after.logits, DeferredLogits)
    torch.testing.assert_close(after.logits + 0.0, stock(**batch()).logits)
    with pytest.raises(RuntimeError, match="the weights have changed since"):
        before.logits.sum()


def test_kernels_with_all_labels_ignored_give_what_stock_gives() -> None:
    ours, stock = build("llama"), build("llama")
    swap(ours)
    ignored = {**batch(), "labels": torch.full((3, 11), -100)}
    losses = [model(**ignored, num_items_in_batch=7).loss for model in (ours, stock)]
    assert [loss.item() for loss in losses] == [0.0, 0.0]
    for model in (ours, stock):
        loss = model(**ignored).loss
        assert loss.isnan()
        loss.backward()
        assert all(gradient.eq(0).all() for gradient in gradients(model).values())


def test_kernels_with_the_labels_shifted_already() -> None:
    ours, stock = build("llama"), build("llama")
    swap(ours)
    labels = F.pad(batch()["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    assert_same_training(ours, stock, shift_labels=labels)


@pytest.mark.parametrize("modules", [["lm_head", "q_proj"], ["q_proj"], "lm_head to save"], ids=str)
def test_kernels_with_lora(modules: Any) -> None:
    def wrapped() -> Any:
        to_save = ["lm_head"] if isinstance(modules, str) else None
        targets = ["q_proj"] if isinstance(modules, str) else modules
        lora = peft.LoraConfig(
            r=2, target_modules=targets, modules_to_save=to_save, task_type="CAUSAL_LM"
        )
        torch.manual_seed(3)
        model = peft.get_peft_model(build("llama"), lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return model.train()

    ours, stock = wrapped(), wrapped()
    names = swap(ours).names
    decision = next(made for made in decisions.made() if made["what"].startswith("loss of"))
    if isinstance(modules, str):
        # PEFT's wrapper keeps two heads and says no sizes: stock stays, and trains the same.
        assert "chunked" in names.values() or decision["chosen"] == "stock"
    else:
        assert "chunked" in names.values(), decision
    assert_same_training(ours, stock)


class Scaled(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def test_kernels_refuse_heads_by_name() -> None:
    hooked, meta, replaced = build("llama"), build("llama"), build("llama")
    hooked.lm_head.register_forward_hook(lambda *_: None)
    meta.lm_head.to("meta")
    replaced.lm_head.forward = replaced.lm_head.forward
    partitioned = build("llama")
    partitioned.lm_head.weight.ds_id = 3
    partitioned.lm_head.__class__ = Scaled
    unasked = build("llama")
    unasked.lm_head.weight.ds_id = 3
    reasons = {
        "a hook on the head": (hooked, "on"),
        "not loaded yet": (meta, "on"),
        "replaced already": (replaced, "on"),
        "partitioned by zero.Init": (partitioned, "on"),
        "sharded; kernels=on": (unasked, "auto"),
    }
    for reason, (model, mode) in reasons.items():
        assert not any("loss of" in what for what in swap(model, mode).names)
        (decision,) = (made for made in decisions.made() if made["what"].startswith("loss of"))
        assert reason in decision["reason"]
        decisions._made.clear()


def test_kernels_of_a_copied_model_use_the_copys_head() -> None:
    ours, stock = build("llama"), build("llama")
    swap(ours)
    copied = copy.deepcopy(ours)
    for model in (copied, stock):
        with torch.no_grad():
            model.lm_head.weight.mul_(3.0)
    assert_same_training(copied, stock)
    assert not gradients(ours)


def test_kernels_copy_and_pickle_a_head_alone() -> None:
    ours, stock = build("llama"), build("llama")
    swap(ours)
    hidden = torch.randn(2, 5, 32)
    for copied in (copy.deepcopy(ours.lm_head), pickle.loads(pickle.dumps(ours.lm_head))):
        assert copied.forward.head is copied
        torch.testing.assert_close(copied(hidden), ours.lm_head(hidden))
        copied.forward.armed = True
        assert isinstance(copied(hidden), DeferredLogits)
        torch.testing.assert_close(copied(hidden) + 0.0, stock.lm_head(hidden))
        assert len(copied.forward.weights) == 1


def test_kernels_let_peft_copy_the_head_to_train_it() -> None:
    ours, stock = build("llama"), build("llama")
    swap(ours)
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    wrapped = []
    for model in (ours, stock):
        torch.manual_seed(3)
        wrapped.append(peft.get_peft_model(model, lora).train())
    assert_same_training(*wrapped)


def test_kernels_under_autocast_keep_accelerates_float32_outputs() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    deepytorch.deactivate()
    plugin = accelerate_adapter.DeepytorchPlugin(kernels="on", log="error")
    stock = build("llama")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[plugin])
    ours = accelerator.prepare(build("llama"))
    try:
        reference = accelerator.prepare_model(stock)
        found, expected = ours(**batch()), reference(**batch())
        assert isinstance(found.logits, DeferredLogits)
        assert found.logits.dtype == expected.logits.dtype == torch.float32
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-3)
        torch.testing.assert_close(found.logits + 0, expected.logits, rtol=0.05, atol=0.02)
        for output in (found, expected):
            accelerator.backward(output.loss)
        for name, gradient in gradients(reference).items():
            mine = gradients(ours)[name]
            assert (mine - gradient).norm() < 0.05 * gradient.norm() + 1e-6, name
    finally:
        assert accelerate_adapter.undo(accelerator)
    assert not any("forward" in vars(module) for module in ours.model.modules())
    assert not isinstance(ours.lm_head.forward, causal_loss.HeadForward)


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {name: value[index % 3] for name, value in batch(index).items()}
        return {name: value.clone() for name, value in row.items()}


class Recording:
    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


class Stock(Recording, Trainer):
    pass


class Ours(Recording, transformers_adapter.DeepytorchTrainer):
    pass


def test_kernels_in_a_trainer_with_metrics(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def run(kind: type[Any], **more: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        deepytorch.deactivate()

        def metrics(prediction: Any) -> dict[str, float]:
            seen[kind.__name__] = prediction.predictions
            return {"rows": float(len(prediction.predictions))}

        trainer = kind(
            model=build("llama"),
            args=TrainingArguments(
                output_dir=str(tmp_path),
                use_cpu=True,
                bf16=False,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=2,
                learning_rate=1e-2,
                optim="adamw_torch",
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=1,
            ),
            train_dataset=Rows(),
            eval_dataset=Rows(),
            compute_metrics=metrics,
            **more,
        )
        trainer.train()
        return trainer, trainer.evaluate()

    ours, evaluated = run(Ours, deepytorch={"kernels": "on", "log": "error"})
    fused = bool(ours.optimizer.optimizer._optimizer_step_pre_hooks)
    assert "forward" in vars(ours.model.lm_head)
    assert transformers_adapter.undo(ours)
    stock, expected = run(Stock)
    assert fused
    assert len(ours.losses) == len(stock.losses) == 4
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert evaluated["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert seen["Ours"].shape == seen["Stock"].shape == (8, 11, VOCABULARY)
    assert abs(seen["Ours"] - seen["Stock"]).max() < 1e-3


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_hook_on_the_gradient_of_logits_runs_or_is_refused(mode: str) -> None:
    stock = build("llama").train()
    model = copy.deepcopy(stock)
    swap(model, mode)
    given = batch()
    found = []
    for network in (model, stock):
        output = network(**given)
        if network is model and mode == "on":
            with pytest.raises(RuntimeError, match="computed without these logits"):
                output.logits.register_hook(lambda gradient: 0.1 * gradient)
            return
        output.logits.register_hook(lambda gradient: 0.1 * gradient)
        output.loss.backward()
        found.append(network.get_input_embeddings().weight.grad)
    torch.testing.assert_close(found[0], found[1])


def test_a_hook_on_the_head_that_comes_later_sees_the_logits() -> None:
    model = build("llama").train()
    swap(model)
    seen: list[Any] = []
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(out.shape))
    model(**batch())
    assert seen == [(*batch()["input_ids"].shape, model.config.vocab_size)]
