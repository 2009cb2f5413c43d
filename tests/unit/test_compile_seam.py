"""A compiled model is stock's for who inspects, changes, copies, exports or compiles it."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deepytorch
from deepytorch_core import compile as engine
from deepytorch_core.compile import seam

pytestmark = pytest.mark.usefixtures("own_profile", "one_thread")

X = torch.ones(2, 6)


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def act(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    @property
    def factor(self) -> float:
        return 1.0

    @staticmethod
    def shift(x: Tensor) -> Tensor:
        return x + 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.b(self.act(self.a(x)))) * self.factor


def new_class() -> Any:
    return type("Own", (Net,), dict(vars(Net)))


def zeros(*_: Any) -> Tensor:
    return torch.zeros(2, 6)


def trained(model: nn.Module, steps: int = 4) -> nn.Module:
    deepytorch.compile(model, "aot-eager")
    for _ in range(steps):
        model(X).square().mean().backward()
    return model


def region_of(model: nn.Module) -> Any:
    found = engine.compilation_of(model)
    assert found is not None
    return found.regions[0]


def patch_static(own: Any, model: Any) -> None:
    own.shift = staticmethod(lambda x: 0 * x)


def patch_property(own: Any, model: Any) -> None:
    own.factor = property(lambda self: 0.0)


def patch_code(own: Any, model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return 0 * x

    own.forward.__code__ = forward.__code__


def patch_base(own: Any, model: Any) -> None:
    model.__class__ = type("Sub", (own,), {})
    model.__class__.forward = lambda self, x: 0 * x


def patch_torchs(own: Any, model: Any) -> None:
    model.b = nn.Identity()
    model.b.forward = lambda x: 0 * x


def replace_a_part(own: Any, model: Any) -> None:
    model.b = nn.Sequential(nn.Linear(6, 6), nn.Dropout(1.0))


def put_on_a_part(own: Any, model: Any) -> None:
    model.b.forward = lambda x: 0 * x


@pytest.mark.parametrize(
    "change",
    [patch_static, patch_property, patch_base, patch_torchs, replace_a_part, put_on_a_part],
)
def test_what_is_changed_later_counts(change: Callable[[Any, Any], None]) -> None:
    own = new_class()
    model = trained(own())
    assert region_of(model).told.chosen
    change(own, model)
    assert model(X).eq(0).all()


def test_code_that_is_put_in_place_counts() -> None:
    own = new_class()
    own.forward = types.FunctionType(Net.forward.__code__, globals(), "forward")
    model = trained(own())
    patch_code(own, model)
    assert model(X).eq(0).all()


def test_a_counter_of_a_class_is_no_change() -> None:
    own = new_class()
    model = trained(own())
    own.calls = 3
    own.scale = 2.0
    model(X)
    assert region_of(model).failure is None


COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    lambda model: vars(twin := type(model).__new__(type(model))).update(vars(model)) or twin,
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    lambda model: model._replicate_for_data_parallel(),
]


@pytest.mark.parametrize("make", COPIES)
def test_a_copy_has_weights_of_its_own(make: Callable[[Any], Any]) -> None:
    model = trained(Net())
    twin = make(model)
    twin._modules = {name: copy.deepcopy(module) for name, module in model._modules.items()}
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert twin(X).eq(0).all()
    assert not model(X).eq(0).all()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_forward_is_the_classs(steps: int) -> None:
    model: Any = trained(Net(), steps)
    assert model.forward.__self__ is model
    assert model.forward.__func__ is Net.forward
    assert "forward" not in vars(model)
    assert not model._forward_pre_hooks
    assert inspect.getfullargspec(model.forward).args == ["self", "x"]


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize(
    "way",
    [
        lambda model: torch.jit.script(nn.Sequential(model))(X),
        lambda model: torch.jit.trace(nn.Sequential(model), X)(X),
        lambda model: torch.export.export(nn.Sequential(model), (X,)).module()(X),
        lambda model: torch.fx.symbolic_trace(nn.Sequential(model))(X),
        lambda model: torch.compile(lambda x: model.__call__(x), backend="eager", fullgraph=True)(
            X
        ),
        lambda model: torch.compile(nn.ModuleList([model])[0], backend="eager", fullgraph=True)(X),
        lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (X,)),
        lambda model: torch.func.vmap(model)(X[None])[0],
    ],
)
def test_who_traces_it_sees_stocks(way: Callable[[Any], Tensor], steps: int) -> None:
    torch.manual_seed(0)
    model = trained(Net(), steps)
    torch.testing.assert_close(way(model), model(X))


def seen_by(register: Callable[[Any], Any], model: nn.Module) -> list[str]:
    seen: list[str] = []
    handle = register(lambda module, *_: seen.append(type(module).__name__))
    model(X).sum().backward()
    handle.remove()
    return seen


@pytest.mark.parametrize(
    "register",
    [
        modules.register_module_forward_hook,
        modules.register_module_forward_pre_hook,
        modules.register_module_full_backward_hook,
        modules.register_module_full_backward_pre_hook,
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_hooks_for_all_modules_see_them(register: Callable[[Any], Any]) -> None:
    model = trained(Net())
    assert sorted(seen_by(register, model)) == ["Linear", "Linear", "Net"]
    model(X)
    assert region_of(model).failure is None


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Functions, Operations])
def test_modes_see_operations(make: Callable[[], Any]) -> None:
    with make() as expected:
        Net()(X)
    expected.seen[:] = [name for name in expected.seen if "tanh" in name or "linear" in name]
    model = trained(Net())
    with make() as found:
        model(X)
    assert [name for name in found.seen if "tanh" in name or "linear" in name] == expected.seen


@pytest.mark.parametrize(
    ("policy", "is_reentrant"),
    [
        pytest.param("auto", False, marks=pytest.mark.extended),
        ("auto", True),
        ("aot-eager", False),
        ("aot-eager", True),
    ],
)
def test_the_whole_model_is_checkpointed(policy: str, is_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Net(), Net(), nn.Dropout(0.3))
    twin = copy.deepcopy(model)
    deepytorch.compile(model, policy)
    losses: list[list[float]] = []
    for network in (twin, model):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        losses.append([])
        for _ in range(12):
            x = torch.randn(3, 6, requires_grad=True)
            loss = checkpoint(network, x, use_reentrant=is_reentrant).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("stance", ["fail_on_recompile", "eager_on_recompile"])
def test_a_scripts_stance_is_about_its_own_code(stance: str) -> None:
    model = Net()
    deepytorch.compile(model, "aot-eager")
    with torch.compiler.set_stance(stance):
        for rows in (3, 4, 5):
            model(torch.randn(rows, 6)).sum().backward()
    assert region_of(model).told.num_compiles


class Sealed(Net):
    def __setattr__(self, name: str, value: Any) -> None:
        if "b" in self.__dict__.get("_modules", ()):
            raise AttributeError(name)
        super().__setattr__(name, value)


class Answering(Net):
    def __getattr__(self, name: str) -> Any:
        return "anything" if name.startswith("any") else super().__getattr__(name)


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.LazyLinear(6)  # type: ignore[assignment]


def scripted() -> Any:
    return torch.jit.script(nn.Linear(6, 6))


POLICIES = ("auto", "aot-eager")


@pytest.mark.parametrize(
    ("policy", "make"),
    [
        pytest.param("auto", Sealed, marks=pytest.mark.extended),
        ("aot-eager", Sealed),
        *((policy, make) for make in (Answering, Lazy, scripted) for policy in POLICIES),
    ],
)
def test_nothing_is_raised_for(make: Callable[[], Any], policy: str) -> None:
    model = make()
    deepytorch.compile(model, policy)
    for _ in range(6):
        model(X).sum().backward()


def test_a_failure_of_ours_leaves_the_model_to_stock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    deepytorch.compile(model, "aot-eager")
    found = engine.compilation_of(model)
    assert found is not None
    monkeypatch.setattr(found, "install", lambda known, **_: [][0])
    for _ in range(3):
        model(X).sum().backward()
    assert seam.PLACE not in vars(model)
    assert "list index out of range" in capsys.readouterr().err
