"""A sharded module gets the objects that it would get unsharded, so what it writes into them stays.

One model: three layers that write their own losses into a box, which is an argument. Each box, and
each way to shard the model, gives the loss and the gradients of the unsharded model.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from fullshard.insight import set_gather_on_read
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard, replicate
from fullshard.sharding.hooks import compat, context
from fullshard.wrappers.fsdp1 import FullyShardedDataParallel, MixedPrecision
from support.events.models import DIM
from support.events.recorder import full_gradients
from support.ranks import distributed

BF16 = torch.bfloat16


def _batch(*, requires_grad: bool = False) -> torch.Tensor:
    """Equal on all ranks, so the mean of their gradients is that of the unsharded model."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, DIM, generator=generator).requires_grad_(requires_grad)


class Log(list[Any]):
    """A list that is not made from its items."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner


@dataclass
class Notes:
    """Each layer takes the place of the field."""

    losses: tuple[torch.Tensor, ...]


class Cache:
    """Registered with torch's pytree, as some versions of transformers register their cache."""

    def __init__(self, items: dict[int, torch.Tensor]) -> None:
        self.items = items


def _register() -> None:
    if Cache not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            Cache,
            lambda cache: (list(cache.items.values()), list(cache.items)),
            lambda values, keys: Cache(dict(zip(keys, values, strict=True))),
        )


class Plain:
    """Not registered with anything."""

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []


@dataclass
class Box:
    """A kind of argument: how it is made, written and read."""

    make: Callable[[], Any]
    write: Callable[[Any, int, torch.Tensor], object]
    read: Callable[[Any], Iterable[torch.Tensor]]


def _values(box: Any) -> Iterable[torch.Tensor]:
    return box.values()


def _set(box: Any, index: int, loss: torch.Tensor) -> None:
    box[index] = loss


def _append(box: Any, index: int, loss: torch.Tensor) -> None:
    box.append(loss)


def _sum_up(box: Any, index: int, loss: torch.Tensor) -> None:
    box["loss"] = box.get("loss", 0) + loss
    box.setdefault("seen", []).append(loss)


BOXES = {
    "list": Box(list, _append, list),
    "deque": Box(deque, _append, list),
    "dict": Box(dict, _set, _values),
    "OrderedDict": Box(OrderedDict, _set, _values),
    "defaultdict": Box(
        partial(defaultdict, list),
        lambda box, index, loss: box["losses"].append(loss),
        lambda box: box["losses"],
    ),
    "a dict updated by each layer": Box(dict, _sum_up, lambda box: [box["loss"], *box["seen"]][1:]),
    "a list with an __init__ of its own": Box(partial(Log, "me"), _append, list),
    "a list inside a tuple": Box(
        lambda: ([], "name"), lambda box, index, loss: box[0].append(loss), lambda box: box[0]
    ),
    "dataclass": Box(
        lambda: Notes(()),
        lambda box, index, loss: setattr(box, "losses", (*box.losses, loss)),
        lambda box: box.losses,
    ),
    "registered class": Box(
        lambda: Cache({}),
        lambda box, index, loss: box.items.update({index: loss}),
        lambda box: box.items.values(),
    ),
    "plain class": Box(
        Plain, lambda box, index, loss: box.items.append(loss), lambda box: box.items
    ),
}


class Layer(nn.Module):
    """Writes a loss of its own into the box."""

    def __init__(self, index: int, box: Box) -> None:
        super().__init__()
        self.index, self.box = index, box
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *, box: Any) -> torch.Tensor:
        """Shape: ``[..., DIM]``, in and out."""
        y = torch.tanh(self.linear(x))
        self.box.write(box, self.index, y.square().mean())
        return y


class Net(nn.Module):
    """The box holds a tensor with a gradient from the second layer on."""

    def __init__(self, box: Box, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.box, self.checkpointed = box, checkpointed
        self.layers = nn.ModuleList([Layer(index, box) for index in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        box = self.box.make()
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, box=box, use_reentrant=False)
            else:
                x = layer(x, box=box)
        losses = list(self.box.read(box))
        assert len(losses) == 3
        loss: torch.Tensor = x.float().mean() + torch.stack([loss.float() for loss in losses]).sum()
        return loss


def _built(box: Box, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(box, **options)


def _by_parts(shard: Callable[..., Any], **arguments: Any) -> Callable[[Net], nn.Module]:
    def sharded(net: Net) -> nn.Module:
        for each in (*net.layers, net):
            shard(each, **arguments)
        return net

    return sharded


def _wrapped(net: Net, **arguments: Any) -> Any:
    wrap: Any = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), **arguments)
    for index, layer in enumerate(net.layers):
        net.layers[index] = wrap(layer)
    return wrap(net)


def _gathering_on_read(net: Net) -> nn.Module:
    _by_parts(fully_shard)(net)
    for each in (*net.layers, net):
        set_gather_on_read(each, True)
    return net


def _compiled(net: Net) -> nn.Module:
    for layer in net.layers:
        layer.compile(backend="eager")
    return _by_parts(fully_shard)(net)


DOORS: dict[str, Callable[[Net], nn.Module]] = {
    "fully_shard": _by_parts(fully_shard),
    "replicate": _by_parts(replicate),
    "FSDP1": _wrapped,
    "gather on read": _gathering_on_read,
    "compiled": _compiled,
}


def _assert_trains_alike(net: nn.Module, whole: nn.Module, tolerance: float = 0.0) -> None:
    for model in (net, whole):
        model(_batch()).backward()
    theirs = {name: param.grad for name, param in whole.named_parameters()}
    for name, grad in full_gradients(net).items():
        expected = theirs[name.replace("_fsdp_wrapped_module.", "")]
        torch.testing.assert_close(grad, expected, rtol=tolerance or None, atol=tolerance or None)


# -- written --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.cross
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", BOXES)
@distributed(2)
def test_what_a_layer_writes_into_an_argument_arrives(kind: str, door: str) -> None:
    _register()
    box = BOXES[kind]
    _assert_trains_alike(DOORS[door](_built(box)), _built(box))


@pytest.mark.parametrize("kind", ["list", "registered class"])
@distributed(2)
def test_it_arrives_under_checkpointing(kind: str) -> None:
    _register()
    box = BOXES[kind]
    net = _by_parts(fully_shard)(_built(box, checkpointed=True))
    _assert_trains_alike(net, _built(box, checkpointed=True))


@pytest.mark.parametrize("door", ["fully_shard", "FSDP1"])
@pytest.mark.parametrize("kind", BOXES)
@distributed(2)
def test_it_arrives_where_inputs_are_cast(kind: str, door: str) -> None:
    _register()
    box = BOXES[kind]
    if door == "FSDP1":
        policy = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
        net = _wrapped(_built(box), mixed_precision=policy)
    else:
        net = _by_parts(fully_shard, mp_policy=MixedPrecisionPolicy(BF16))(_built(box))
    _assert_trains_alike(net, _built(box), tolerance=3e-2)


class InPlace(nn.Module):
    """Updates the caller's batch, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, given: dict[str, torch.Tensor]) -> None:
        """Replace the hidden state, and add a key."""
        given["hidden"] = torch.tanh(self.linear(given["hidden"]))
        given[f"loss {len(given)}"] = given["hidden"].square().mean()


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(BF16)], ids=["fp32", "bf16"])
@distributed(2)
def test_a_module_that_returns_nothing_trains_by_what_it_wrote(policy: Any) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleList([InPlace() for _ in range(3)])
    net = copy.deepcopy(whole)
    arguments = {} if policy is None else {"mp_policy": policy}
    for layer in net:
        fully_shard(layer, **arguments)
    keys = []
    for model in (whole, net):
        given = {"hidden": _batch(), "target": _batch()}
        before = dict(given)
        for layer in model:
            layer(given)
        assert given["target"] is before["target"]
        assert given["target"].dtype == before["hidden"].dtype == torch.float32
        keys.append(list(given))
        torch.stack([given[k].float().sum() for k in keys[-1] if k != "target"]).sum().backward()
    assert keys[0] == keys[1]
    tolerance = 0.05 if policy else 1e-6
    for layer, ours in zip(whole, net, strict=True):
        for name, grad in full_gradients(ours).items():
            expected = layer.get_parameter(name).grad
            torch.testing.assert_close(grad, expected, rtol=tolerance, atol=tolerance)


# -- the same objects -----------------------------------------------------------------------------


class Looks(nn.Module):
    """Keeps what it is called with, and hands attributes of a tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seen: list[Any] = []

    def forward(self, x: Any, context: Any = None, *, extra: Any = None) -> torch.Tensor:
        """The aux loss is an attribute of the output."""
        self.seen = [x, context, extra]
        y: Any = self.linear(x)
        y.aux = getattr(x, "aux", 0) + y.square().mean()
        x.note = "seen"
        return y


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@distributed(2)
def test_arguments_are_the_objects_of_the_caller(dtype: torch.dtype) -> None:
    module: Any = fully_shard(Looks(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    x, other = _batch(requires_grad=True), [_batch(requires_grad=True)]
    leaf, before = other[0], x.clone()
    module(x, x, extra=other)
    assert module.seen[0] is module.seen[1] is x
    assert module.seen[2] is other
    assert other[0] is leaf
    for each in (x, leaf):
        assert each.is_leaf
        assert each.dtype == torch.float32
    assert torch.equal(x, before)
    assert x.note == "seen"


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@distributed(2)
def test_an_attribute_of_a_tensor_goes_from_layer_to_layer(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleList([Looks(), Looks()])
    net = copy.deepcopy(whole)
    for layer in net:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    found = []
    for model in (whole, net):
        y: Any = _batch(requires_grad=True)
        for layer in model:
            y = layer(y)
        (y.float().mean() + y.aux.float()).backward()
        found.append(y.aux.item())
    assert found[0] == pytest.approx(found[1], rel=0.05 if dtype is BF16 else 1e-6)
    expected = whole[0].get_parameter("linear.weight").grad
    grad = full_gradients(net[0])["linear.weight"]
    rtol, atol = (0.1, 0.02) if dtype is BF16 else (1e-5, 1e-6)
    torch.testing.assert_close(grad, expected, rtol=rtol, atol=atol)


class Counts(nn.Module):
    """Sets an attribute of what it returns: its input, or what a layer makes of that."""

    def __init__(self, *, returns_input: bool) -> None:
        super().__init__()
        self.linear, self.returns_input = nn.Linear(DIM, DIM), returns_input

    def forward(self, x: Any) -> Any:
        """Shape: that of ``x``."""
        y = x if self.returns_input else self.linear(x)
        y.count = getattr(x, "count", 0) + 1
        return y


POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(BF16),
    "cast output": MixedPrecisionPolicy(output_dtype=torch.float64, cast_forward_inputs=False),
}


@pytest.mark.parametrize("within", ["nothing", "profiler", "torch.func.grad"])
@pytest.mark.parametrize("returns_input", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@distributed(2)
def test_what_a_module_returns_keeps_its_attributes(
    policy: str, returns_input: bool, within: str
) -> None:
    counts: Any = fully_shard(Counts(returns_input=returns_input), mp_policy=POLICIES[policy])

    def run(x: Any) -> torch.Tensor:
        x.count = 4
        y = counts(x)
        assert y.count == 5
        loss: torch.Tensor = y.float().sum()
        return loss

    x: Any = _batch(requires_grad=True)
    if within == "torch.func.grad":
        torch.func.grad(run)(x)
        return
    with torch.profiler.profile(acc_events=True) if within == "profiler" else nullcontext():
        run(x).backward()
    assert x.count == (5 if returns_input else 4)


class Raises(nn.Module):
    """Raises after it looked at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, error: BaseException) -> None:
        """Never return."""
        assert x.dtype == BF16
        raise error


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
@distributed(2)
def test_an_input_is_its_own_again_after_an_error(error: BaseException) -> None:
    outer: Any = nn.Sequential(Raises())
    outer.forward = lambda x, error: outer[0](x, error)
    for each in (outer[0], outer):
        fully_shard(each, mp_policy=MixedPrecisionPolicy(BF16))
    x = _batch(requires_grad=True)
    with pytest.raises(type(error)):
        outer(x, error)
    outer.reset_iter_state()  # an interrupt ends no call by itself
    assert x.dtype == torch.float32
    assert x.is_leaf


@pytest.mark.parametrize("inside", [True, False])
@distributed(2)
def test_the_gradient_of_an_input_is_retained(inside: bool) -> None:
    grads = []
    for shard in (fully_shard, lambda module: module):
        torch.manual_seed(0)
        module = shard(Looks())
        hidden = _batch(requires_grad=True) * 2
        if inside:
            module.register_forward_pre_hook(lambda _, args: args[0].retain_grad())
        else:
            hidden.retain_grad()
        (module(hidden).sum() + hidden.sum()).backward()
        assert hidden.grad is not None
        grads.append(hidden.grad)
    torch.testing.assert_close(grads[0], grads[1])


@distributed(2)
def test_forward_may_not_retain_the_gradient_of_an_input_that_is_cast() -> None:
    module = fully_shard(Looks(), mp_policy=MixedPrecisionPolicy(BF16))
    hidden = _batch(requires_grad=True) * 2
    hook = module.register_forward_pre_hook(lambda _, args: args[0].retain_grad())
    with pytest.raises(RuntimeError, match=r"retain_grad.*view_as"):
        module(hidden)
    hook.remove()
    hidden = _batch(requires_grad=True) * 2
    hidden.retain_grad()
    module(hidden).sum().backward()
    assert hidden.grad is not None


class Skips(nn.Module):
    """Returns its input on one rank, and trains on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *, skip: bool, boxed: bool) -> Any:
        """The input itself, or what the layer makes of it."""
        y = x if skip else self.linear(x)
        return {"hidden": y} if boxed else y


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@distributed(2)
def test_a_rank_that_returns_its_input_takes_part_in_the_reduction(
    dtype: torch.dtype, boxed: bool
) -> None:
    torch.manual_seed(0)
    module = fully_shard(Skips(), mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    hidden = _batch(requires_grad=True) * 1
    output = module(hidden, skip=dist.get_rank() == 1, boxed=boxed)
    output = output["hidden"] if boxed else output
    assert output.dtype == dtype
    output.sum().backward()
    grad = full_gradients(module)["linear.bias"]
    assert grad is not None
    torch.testing.assert_close(grad, torch.full_like(grad, len(hidden) / 2))


@distributed(1)
def test_two_threads_may_not_call_modules_with_one_tensor_at_once() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert leave.wait(30)
            return self.linear(x)

    first, second = fully_shard(Waits()), fully_shard(nn.Linear(DIM, DIM))
    x = _batch(requires_grad=True)
    thread = threading.Thread(target=first, args=(x,))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(RuntimeError, match="two threads"):
        second(x)
    second(x.view_as(x))
    leave.set()
    thread.join()
    assert x.is_leaf


# -- recomputations -------------------------------------------------------------------------------


class Recomputes(nn.Module):
    """Checkpoints its layer, and gives it a tensor with an attribute and a list, as they came."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(DIM, DIM), reentrant

    def inner(self, x: Any, given: list[torch.Tensor]) -> torch.Tensor:
        """A product, so that what it reads is saved for backward."""
        return torch.tanh(self.linear(x)) * given[0] * getattr(x, "factor", 1)

    def forward(self, x: Any, given: list[torch.Tensor]) -> torch.Tensor:
        """Shape: that of ``x``."""
        x.factor = torch.full((), 3.0, dtype=x.dtype)
        return checkpoint(self.inner, x, given, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@distributed(2)
def test_a_recomputation_gets_what_forward_got(dtype: torch.dtype, reentrant: bool) -> None:
    torch.manual_seed(0)
    whole = nn.ModuleList([Recomputes(reentrant), Recomputes(reentrant)])
    net = copy.deepcopy(whole)
    for layer in net:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    other = _batch()
    for model in (whole, net):
        x, given = _batch(requires_grad=True), [other]
        for layer in model:
            x = layer(x, given)
        x.float().square().sum().backward()
        assert other.dtype == torch.float32
    tolerance = 0.3 if dtype is BF16 else 1e-5
    for layer, ours in zip(whole, net, strict=True):
        for name, grad in full_gradients(ours).items():
            expected = layer.get_parameter(name).grad
            torch.testing.assert_close(grad, expected, rtol=tolerance, atol=tolerance)


class Multiplies(nn.Module):
    """Saves its inputs for backward, whether they require a gradient or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        """Shape: that of ``x``."""
        return self.linear(x) * given[0]


def _kept_as_they_are(module: nn.Module, *args: Any) -> Any:
    """Calls it, while autograd keeps the very objects that it saves."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return module(*args)


KEEPERS: dict[str, Callable[..., Any]] = {
    "hooks": _kept_as_they_are,
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("keeper", KEEPERS)
@distributed(2)
def test_saved_inputs_stay_as_the_module_had_them(keeper: str, learns: bool) -> None:
    """Inputs that a policy casts, and of which the saved objects outlive the call."""
    torch.manual_seed(0)
    whole = Multiplies()
    net = copy.deepcopy(whole)
    fully_shard(net, mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    for model in (whole, net):
        x, given = _batch(requires_grad=learns or keeper == "reentrant"), [_batch()]
        KEEPERS[keeper](model, x, given).float().square().sum().backward()
        assert x.dtype == given[0].dtype == torch.float32
    for name, grad in full_gradients(net).items():
        torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=0.3, atol=0.3)


@pytest.mark.parametrize("raises", [False, True])
@distributed(1)
def test_inputs_are_their_own_again_though_the_engine_still_holds_a_backward(raises: bool) -> None:
    """As its thread for a device may for a moment, after backward returned to the caller."""
    held: list[Callable[[], None]] = []

    def hold(end: Callable[[], None]) -> None:
        held.append(end)
        compat.queue_end_of_backward(end)

    net: Any = fully_shard(nn.Linear(DIM, DIM), mp_policy=MixedPrecisionPolicy(BF16))
    x = _batch()
    with patch.object(context, "queue_end_of_backward", hold):
        out = net(x)
        if raises:
            net.weight.register_hook(_refuse)
            with pytest.raises(ValueError, match="refused"):
                out.sum().backward()
            net.reset_iter_state()
        else:
            out.sum().backward()
    assert held
    assert x.dtype == torch.float32


def _refuse(grad: torch.Tensor) -> None:
    raise ValueError("refused")


@distributed(2)
def test_backward_stays_out_of_graphs_that_a_module_only_passes_on() -> None:
    box = BOXES["list"]
    sharded: Any = _by_parts(fully_shard)(_built(box))
    net, whole = sharded.layers[0], _built(box).layers[0]
    for model in (net, whole):
        losses: list[torch.Tensor] = []
        for _ in range(2):  # the graphs of the first losses are freed
            model(_batch(requires_grad=True), box=losses).sum().backward()
    for name, grad in full_gradients(net).items():
        torch.testing.assert_close(grad, whole.get_parameter(name).grad)


class ScalesBoth(nn.Module):
    """Changes two inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((DIM,), 2.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return x.mul_(self.scale) + y.add_(self.scale)


@distributed(2)
def test_several_inputs_may_be_changed_in_place() -> None:
    grads = []
    for module in (ScalesBoth(), fully_shard(ScalesBoth())):
        leaves = [_batch(requires_grad=True) for _ in range(2)]
        x, y = (leaf * 1 for leaf in leaves)
        (module(x, y) * x * y).sum().backward()
        grads.append([leaf.grad for leaf in leaves] + list(full_gradients(module).values()))
    torch.testing.assert_close(grads[0], grads[1])


# -- where torch binds a tensor to its object -----------------------------------------------------


@pytest.mark.parametrize("kind", BOXES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@distributed(2)
def test_it_arrives_while_a_profiler_runs(dtype: torch.dtype, kind: str) -> None:
    _register()
    box = BOXES[kind]
    policy = MixedPrecisionPolicy(dtype)
    net, whole = _by_parts(fully_shard, mp_policy=policy)(_built(box)), _built(box)
    tolerance = 3e-2 if dtype is BF16 else 0.0
    with torch.profiler.profile(record_shapes=True, profile_memory=True, acc_events=True) as found:
        _assert_trains_alike(net, whole, tolerance)
    net.zero_grad()
    whole.zero_grad()
    _assert_trains_alike(net, whole, tolerance)  # what it recorded still binds some tensors
    assert found.events()


@pytest.mark.parametrize("boxed", [False, True])
@distributed(2)
def test_a_rank_that_is_profiled_takes_part_in_the_reduction(boxed: bool) -> None:
    torch.manual_seed(0)
    module = fully_shard(Skips())
    hidden = _batch(requires_grad=True) * 1
    rank = dist.get_rank()
    with torch.profiler.profile(record_shapes=True, acc_events=True) if rank else nullcontext():
        output = module(hidden, skip=rank == 1, boxed=boxed)
        (output["hidden"] if boxed else output).sum().backward()
    grad = full_gradients(module)["linear.bias"]
    assert grad is not None
    torch.testing.assert_close(grad, torch.full_like(grad, len(hidden) / 2))
