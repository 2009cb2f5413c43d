"""Accelerate does local SGD and accumulates, and transformers' Trainer tries rates."""

import sys

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


def fresh():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(0)


class Local(nn.Sequential):
    pass


def local_sgd():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Local(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(TensorDataset(torch.randn(40, 8), torch.randn(40, 1)), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for step, (inputs, targets) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                local.step()
            print(f"local_sgd step {step} loss {loss.item():.6f}")
    print("keys", *accelerator.get_state_dict(model))


class Show(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"search step {state.global_step} loss {float(logs['loss']):.4f}")


def build():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


def search():
    ids = torch.randint(1, 32, (24, 9))
    rows = [{"input_ids": sequence, "labels": sequence} for sequence in ids]
    for rate in (1e-3, 1e-2):
        arguments = TrainingArguments(
            output_dir=sys.argv[1] if len(sys.argv) > 1 else "out",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            learning_rate=rate,
            max_steps=6,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model_init=build,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows[:4],
            callbacks=[Show()],
        )
        trainer.train()
        print(f"found step 0 loss {trainer.evaluate()['eval_loss']:.4f}")


for train in (local_sgd, search):
    fresh()
    train()
