"""Training passes replayed as CUDA graphs: what eager gives, and eager where they can't be.

tests/unit/test_compile_replay.py runs these on the CPU, where a graph is a function called again.
"""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepytorch_core.compile import capture, graph_trial, replay
from deepytorch_core.compile.capture import Capture
from deepytorch_core.guard import borrowed_grads
from deepytorch_core.testing import needs_gpus, spawn_ranks

pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(300)]

DEVICE = "cuda"
STEPS = 6


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(16, 33)
        self.norm = nn.BatchNorm1d(33)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(33, 5)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.dropout(torch.tanh(self.norm(self.up(x))))
        out = self.down(hidden) * scale
        return {"loss": out.square().mean(), "out": out, "name": "net"}


def made(dropout: float = 0.0) -> Net:
    torch.manual_seed(3)
    return Net(dropout).to(DEVICE)


def passes(model: nn.Module, number: int, x: Tensor | None = None) -> None:
    """So many training passes, each with its own gradients; of random inputs, or of `x`."""
    for _ in range(number):
        model.zero_grad()
        given = torch.randn(7, 16, device=DEVICE) if x is None else x
        model(given)["loss"].backward()


def placed(model: nn.Module) -> nn.Module:
    return model.to(DEVICE)


def captured(model: nn.Module) -> Capture:
    found = Capture(model, is_on=lambda: True)
    found.install()
    return found


def train(
    model: nn.Module,
    loss_of: Callable[[Any], Tensor] = lambda found: found["loss"],
    rows: Any = (7,) * STEPS,
    half: bool = False,
) -> list[float]:
    """Losses, and a sum over each parameter after each step."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, enabled=half)
    seen: list[float] = []
    for number in rows:
        x = torch.randn(number, 16, device=DEVICE)
        with torch.autocast(DEVICE, torch.float16, enabled=half):
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.item(), *(tensor.sum().item() for tensor in model.state_dict().values())]
    return seen


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_replayed_steps_train_as_eager_ones(dropout: float, half: bool) -> None:
    expected = train(made(dropout), half=half)
    model = made(dropout)
    found = captured(model)
    assert train(model, half=half) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert (found.failure, found.num_captured) == (None, 1)
    found.remove()
    assert "forward" not in vars(model)


def test_calls_of_several_kinds_have_a_graph_each() -> None:
    rows = [7, 9, 7, 30, 9, 7, 30, 2]
    expected = train(made(), rows=rows)
    model = made()
    found = captured(model)
    assert train(model, rows=rows) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert found.num_captured == 4


def test_nothing_that_was_given_out_is_written_to() -> None:
    model = made()
    found = captured(model)
    kept = []
    for number in range(4):
        x = torch.full((7, 16), float(number), device=DEVICE)
        model.zero_grad(set_to_none=True)
        result = model(x)
        result["loss"].backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        tensors = [result["loss"].detach(), result["out"].detach(), *gradients]
        kept.append((tensors, [tensor.clone() for tensor in tensors]))
    assert found.num_captured == 1
    for tensors, values in kept:
        assert all(torch.equal(given, value) for given, value in zip(tensors, values, strict=True))


def test_gradients_accumulate() -> None:
    models = [made(), made()]
    captured(models[1])
    for model in models:
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(7, 16, device=DEVICE))["loss"].backward()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda found: found["out"].abs().mean(),
        lambda found: found["loss"] + found["out"].mean(),
    ],
    ids=["another output", "both"],
)
def test_a_loss_of_ones_own_gets_its_gradients(loss_of: Callable[[Any], Tensor]) -> None:
    expected = train(made(0.5), loss_of)
    model = made(0.5)
    captured(model)
    assert train(model, loss_of) == pytest.approx(expected, rel=1e-4, abs=1e-4)


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {**super().forward(x, scale), "more": self.other(x)}


def test_an_output_beside_the_loss_trains_its_own_parameters() -> None:
    torch.manual_seed(3)
    models = [TwoHeads().to(DEVICE)]
    models.append(copy.deepcopy(models[0]))
    found = captured(models[1])
    for loss_of in (
        lambda found: found["loss"],
        lambda found: found["loss"] + found["more"].square().mean(),
        lambda found: found["more"].square().mean(),
    ):
        expected = train(models[0], loss_of)
        assert train(models[1], loss_of) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert found.num_captured == 1


def test_passes_within_passes_and_second_backward_passes() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        xs = [torch.randn(7, 16, device=DEVICE) for _ in range(3)]
        for x in xs:
            model(x)["loss"].backward()
        first, second = (model(x)["loss"] for x in xs[:2])
        (first * second).backward(retain_graph=True)
        (first + second).backward()
        weight = next(model.parameters())
        (slope,) = torch.autograd.grad(model(xs[0])["loss"], weight, create_graph=True)
        slope.square().sum().backward()
        with torch.no_grad():
            model(xs[1])
        model.eval()
        model(xs[1])["loss"].backward()
        model.train()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = run(made())
    model = made()
    captured(model)
    for mine, other in zip(expected, run(model), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_inputs_get_gradients() -> None:
    models = [made(), made()]
    captured(models[1])
    found = []
    for model in models:
        torch.manual_seed(1)
        for _ in range(2):
            x = torch.randn(7, 16, device=DEVICE, requires_grad=True)
            model(x)["loss"].backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "LENT_BYTES", 1)


def lent_of(found: Capture) -> int:
    return len(found._recorder._borrowed._lent)


@pytest.mark.usefixtures("lending")
@pytest.mark.parametrize("zeroes", ["before", "between", "after", "every second", "in place"])
def test_lent_gradients_are_added_up_and_thrown_away_at_any_time(zeroes: str) -> None:
    def run(model: nn.Module) -> list[float]:
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for number in range(8):
            if zeroes == "before":
                optimizer.zero_grad()
            loss = model(torch.randn(7, 16, device=DEVICE))["loss"]
            if zeroes in ("between", "in place"):
                optimizer.zero_grad(set_to_none=zeroes == "between")
            loss.backward()
            if zeroes == "every second" and number % 2 == 0:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if zeroes in ("after", "every second"):
                optimizer.zero_grad()
            seen += [loss.item(), *(weight.sum().item() for weight in model.parameters())]
        return seen

    expected = run(made())
    model = made()
    found = captured(model)
    assert run(model) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert (found.failure, found.num_captured, found.has_replays) == (None, 1, True)
    assert found._recorder.may_lend


@pytest.mark.usefixtures("lending")
def test_lent_gradients_that_somebody_keeps_stay_what_they_are() -> None:
    model = made()
    found = captured(model)
    x = torch.randn(7, 16, device=DEVICE)
    passes(model, 4, x)
    gradient = model.up.weight.grad
    assert gradient is not None
    kept = gradient.view(-1)
    value = kept.clone()
    assert lent_of(found) > 0
    for _ in range(3):
        model.zero_grad()
        model(2 * x)["loss"].backward()
        assert torch.equal(kept, value)
    assert not found._recorder.may_lend
    del kept, gradient
    model.zero_grad()
    model(2 * x)["loss"].backward()
    assert lent_of(found) == 0, "from then on they are copied"


@pytest.mark.usefixtures("lending")
def test_gradients_that_hooks_see_are_not_lent() -> None:
    model = made()
    model.up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model.down.weight.register_hook(lambda gradient: None)
    found = captured(model)
    passes(model, 4)
    assert found.has_replays
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    assert lent_of(found) == len(trained) - 2


@pytest.mark.usefixtures("lending")
def test_lent_gradients_outlive_their_graphs() -> None:
    model = made()
    found: Any = captured(model)
    passes(model, 4)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    values = [gradient.clone() for gradient in gradients]
    assert lent_of(found) == len(gradients)
    aliases = [gradient.view(-1) for gradient in gradients[:2]]
    found.remove()
    del found
    gc.collect()
    others = [torch.full((1000,), 7.0, device=DEVICE) for _ in range(100)]
    assert all(
        torch.equal(gradient, value) for gradient, value in zip(gradients, values, strict=True)
    )
    for alias, value in zip(aliases, values, strict=False):
        assert torch.equal(alias, value.view(-1))
    kept = [each for each in borrowed_grads._buried if borrowed_grads._living(each[0])]
    assert kept, "somebody still has some of the memory"
    del others, aliases, alias
    borrowed_grads.BorrowedGrads()
    assert not any(each is other for each in kept for other in borrowed_grads._buried)


class Offset(Net):
    """The gradient of its offset is the loss's own."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        found = super().forward(x, scale)
        return {**found, "loss": found["loss"] + self.offset}


@pytest.mark.usefixtures("lending")
def test_a_gradient_that_is_the_losses_is_not_lent() -> None:
    model: Any = placed(Offset())
    found: Any = captured(model)
    passes(model, 4)
    (gradient,) = [weight.grad for name, weight in model.named_parameters() if name == "offset"]
    assert gradient is not None
    alone = gradient.view(-1)
    assert lent_of(found) > 0
    found.remove()
    del found
    gc.collect()
    others = [torch.full((), 7.0, device=DEVICE) for _ in range(2000)]
    assert (gradient.item(), alone.item()) == (1.0, 1.0)
    del others


class BesideSparse(nn.Module):
    """A table whose gradient is sparse, looked up outside of the module's pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.table = nn.Embedding(50, 16, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


@pytest.mark.usefixtures("lending")
def test_a_sparse_gradient_is_nothing_that_was_lent() -> None:
    model: Any = placed(BesideSparse())
    found = captured(model)
    for _ in range(6):
        out = model(model.table(torch.randint(0, 50, (7,), device=DEVICE)))
        model.zero_grad()
        out["loss"].backward()
    assert found.has_replays
    assert lent_of(found) > 0
    assert model.table.weight.grad.is_sparse


@pytest.mark.usefixtures("lending")
def test_graphs_that_are_not_used_any_more_are_let_go() -> None:
    model = made()
    found = captured(model)
    x = torch.randn(7, 16, device=DEVICE)
    passes(model, 5, x)
    kept = [weight.grad.detach() for weight in model.parameters() if weight.grad is not None]
    assert found.has_replays
    passes(model, 40, x)
    assert "keeps the gradients" in (found.failure or "")
    assert not found.has_replays
    # A cycle with the recorder keeps it, but not the graphs' memory.
    assert not found._recorder._borrowed._graphs
    del kept


def test_precision_may_have_been_set_in_the_newer_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise RuntimeError("a mix of the older and the newer way")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    model = made()
    found = captured(model)
    passes(model, 4)
    assert found.has_replays


class WaitsUnseen(Net):
    """Torch can't see that it waits: a library does."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        ctypes.CDLL("libcuda.so.1").cuCtxSynchronize()
        return super().forward(x, scale)


def test_a_capture_that_cuda_ends_leaves_the_training_where_it_was() -> None:
    model: Any = placed(WaitsUnseen())
    found = captured(model)
    stream = torch.cuda.current_stream()
    for _ in range(6):
        model(torch.randn(7, 16, device=DEVICE))["loss"].backward()
        assert torch.cuda.current_stream() == stream
    assert (found.failure is not None, found.has_replays) == (True, False)
    other = made()
    assert captured(other).failure is None
    other(torch.randn(7, 16, device=DEVICE))["loss"].backward()
    torch.empty(1000, pin_memory=True)


class Waits(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        if x.sum().item() > 0:
            scale = scale * 2
        return super().forward(x, scale)


class Counts(Net):
    calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        self.calls = self.calls + 1
        return super().forward(x, scale * self.calls)


class Keeps(Net):
    kept: Any = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        self.kept = x * 2
        return super().forward(x, scale)


class DrawsOnTheHost(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x, scale if float(torch.rand(())) < 0.5 else 2 * scale)


class Asks(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x, 2 * scale if torch.cuda.is_current_stream_capturing() else scale)


def test_a_captured_pass_goes_the_way_that_was_rehearsed() -> None:
    torch.manual_seed(3)
    model = Asks().to(DEVICE)
    other = copy.deepcopy(model)
    expected = train(model)
    found = captured(other)
    assert train(other) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert found.has_replays


class WritesToItsInput(Net):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return super().forward(x.add_(1.0), scale)


@pytest.mark.parametrize("kind", [Waits, Counts, Keeps, DrawsOnTheHost, WritesToItsInput])
def test_what_cannot_be_replayed_runs_as_before(kind: type[Net]) -> None:
    torch.manual_seed(3)
    model: Any = kind().to(DEVICE)
    other = copy.deepcopy(model)
    expected = train(model)
    found = captured(other)
    assert train(other) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert not found.has_replays
    if kind is Keeps:
        assert torch.equal(model.kept, other.kept)
    assert torch.rand(2, device=DEVICE).shape == (2,), "the generator is out of the capture"


def test_changes_of_the_module_are_seen() -> None:
    def run(model: Any) -> list[float]:
        seen = train(model)
        model.dropout.p = 0.0
        model.up.weight.requires_grad_(False)
        seen += train(model)
        model.down = copy.deepcopy(model.down)
        seen += train(model)
        model.up.weight.data = model.up.weight.data.clone()
        handle = model.down.register_forward_hook(lambda module, args, out: out * 2)
        seen += train(model)
        handle.remove()
        return seen + train(model)

    expected = run(made(0.5))
    model = made(0.5)
    captured(model)
    assert run(model) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_hooks_of_the_module_itself_come_and_go() -> None:
    model = made()
    found = captured(model)
    train(model)
    handle = model.register_forward_hook(lambda module, args, out: {**out, "seen": True})
    assert model(torch.randn(7, 16, device=DEVICE))["seen"]
    handle.remove()
    train(model)
    assert found.num_captured == 1


def test_copies_of_a_replayed_module_are_plain() -> None:
    model = made()
    captured(model)
    train(model)
    other = copy.deepcopy(model)
    assert train(other, rows=(7,))
    assert vars(other).get("_compiled_call_impl") is None


def test_a_recurrent_network_keeps_its_weights_elsewhere() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(16, 8, batch_first=True)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.inner(x[None])[0].square().mean()}

    torch.manual_seed(3)
    models = [Recurrent().to(DEVICE)]
    models.append(copy.deepcopy(models[0]))
    expected = train(models[0])
    captured(models[1])
    assert train(models[1]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


class Slow(nn.Module):
    """Many small kernels: launches are all its time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(60))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).sin().cos()
        return x.square().mean()


def test_the_trial_keeps_what_is_faster(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepytorch_core.base import config, decisions

    monkeypatch.setattr(decisions, "_made", [])
    monkeypatch.setattr(
        config, "_current", config.Options(profile=str(tmp_path / "p.json"), log="error")
    )
    for reason in ("faster than launched", "from the profile"):
        torch.manual_seed(0)
        model = Slow().to(DEVICE)
        trial = graph_trial.GraphTrial(model, tokens=lambda: 7)
        model.register_forward_pre_hook(
            lambda module, args, trial=trial: None if trial.is_settled else trial.on_forward(True)
        )
        for _ in range(90):
            model(torch.randn(7, 16, device=DEVICE)).backward()
        assert trial.is_settled
        decision = decisions.made()[-1]
        assert (decision["chosen"], decision["reason"]) == ("replayed", reason)
        trial.undo()
        assert "forward" not in vars(model)


def test_why_a_module_is_left_alone() -> None:
    assert capture.why_not(made()) is None
    assert "one GPU" in str(capture.why_not(Net()))
    model = made()
    model.down.register_forward_hook(lambda *_: None)
    assert capture.why_not(model) == "there are hooks on down"
    assert "nothing" in str(capture.why_not(made().requires_grad_(False)))


def _under_ddp(rank: int, world_size: int) -> tuple[list[float], list[float], int]:
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(0)
    models = [DistributedDataParallel(made(), find_unused_parameters=True) for _ in range(2)]
    found = captured(models[1].module)
    expected, losses = train(models[0]), train(models[1])
    assert found.failure is None
    return losses, expected, found.num_captured


def test_replayed_steps_train_under_ddp() -> None:
    ((losses, expected, num_captured),) = spawn_ranks(_under_ddp, 1, backend="nccl")
    assert losses == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert num_captured == 1
