"""Names of torch that are not public, used in this file alone. Seen on torch 2.11, 2.13 and 2.15.

- ``torch.utils._python_dispatch.TorchDispatchMode``: sees each operation.
- ``torch._dynamo.OptimizedModule``, ``Module._compiled_call_impl``: whether a module is compiled.
- ``torch._subclasses.fake_tensor``: tensors that have all but data.
- ``torch.testing._internal.distributed.fake_pg.FakeStore``: a store that no process answers, for a
  world of one real rank and many missing ranks. Its module registers the backend ``fake``.
- ``torch.utils._pytree``: nested containers.
- ``torch.utils.flop_counter.flop_registry``: the formulas of torch's FLOP counter, undocumented.
- ``torch.autograd._get_sequence_nr``, ``Node._sequence_nr``, ``torch._C._current_autograd_node``:
  which operation of forward a node of backward belongs to.
- ``UntypedStorage._cdata``: which storage it is; ``data_ptr()`` is 0 for one without memory.
- ``distributed_c10d._resolve_process_group``: the process group of a functional collective's name.
- ``torch.utils._foreach_utils``, ``torch.optim.optimizer``: on which devices and of which types
  optimizers and clipping work on many tensors at once.
- ``torch.utils.weak.WeakIdKeyDictionary``: by tensor, as long as it lives; no public module.
- ``torch.autograd._enable_profiler_legacy``: the bytes that an operation allocates and frees, in
  order. The public profiler sums them, and writes lines of its own to the standard error.
- ``torch.utils._python_dispatch._disable_current_modes``: operations on values inside a mode.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Self, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils._foreach_utils
from torch._subclasses import fake_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

__all__ = [
    "HOST_READ",
    "DispatchMode",
    "FakeTensor",
    "FakeTensors",
    "UnknownOperator",
    "UnknownValue",
    "WeakIdKeyDictionary",
    "answer",
    "backward_node",
    "backward_number",
    "copy_hooks",
    "default_store",
    "drop_hooks",
    "errors_raised_alone",
    "flop_formula",
    "foreach_as_on_accelerators",
    "forward_number",
    "hooks_of",
    "in_mesh",
    "is_compiled",
    "is_fake",
    "lonely_group",
    "memory_changes",
    "module_hooks",
    "on_values",
    "operators_replaced",
    "process_group_of",
    "schema_of",
    "storage_address",
    "tree_leaves",
    "tree_map",
    "unknown_custom_operator",
]

_KINDS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}

UnknownValue = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
"""What an operation raises whose result depends on data that a fake tensor does not have."""

UnknownOperator = fake_tensor.UnsupportedOperatorException
"""What an operator raises that nobody told what it returns for tensors without data."""


@contextmanager
def errors_raised_alone() -> Iterator[None]:
    """Inside the ``with`` block torch does not also log what operations without data raise.

    Seen in torch 2.13 and 2.15, which log the traceback of each.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def unknown_custom_operator(error: RuntimeError) -> str:
    """Return the name of a ``torch.library.custom_op`` without a fake implementation.

    "" if the error is another one. torch (2.11 to 2.15) raises no class of its own for it.
    """
    found = re.search(r"no fake impl registered for <CustomOpDef\((.+?)\)>", str(error))
    return found[1] if found else ""


def hooks_of(param: torch.Tensor) -> list[str]:
    """Return the kinds of hook that ``param`` has; torch offers no way to ask."""
    return [public for public, private in _KINDS.items() if getattr(param, private, None)]


def copy_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Register the hooks of ``source`` with ``target`` too."""
    for public, private in _KINDS.items():
        for hook in (getattr(source, private, None) or {}).values():
            getattr(target, public)(hook)


def drop_hooks(param: torch.Tensor) -> None:
    """Take the hooks off ``param``."""
    for private in _KINDS.values():  # torch keeps calling hooks whose dict is only replaced
        (getattr(param, private, None) or {}).clear()


def module_hooks(module: torch.nn.Module) -> dict[str, dict[int, Any]]:
    """Return the hooks that ``module`` has by their kinds, and by number; torch does not list them.

    To delete one takes it off the module.
    """
    return {
        "forward pre": module._forward_pre_hooks,
        "forward": module._forward_hooks,
        "backward pre": module._backward_pre_hooks,
        "backward": module._backward_hooks,
    }


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` or the module's own ``compile()`` was applied."""
    # By name: to import the class imports the compiler.
    wrapped = type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def lonely_group(ranks: int) -> Iterator[None]:
    """Provide a process group that moves nothing, in which this process is the only rank there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def process_group_of(named: Any) -> dist.ProcessGroup:
    """The process group that an operator's argument means: itself, or its name."""
    if isinstance(named, dist.ProcessGroup):
        return named
    return dist.distributed_c10d._resolve_process_group(named)


@contextmanager
def foreach_as_on_accelerators() -> Iterator[None]:
    """Inside the ``with`` block torch's optimizers and clipping choose kernels over many tensors.

    As they do for tensors of an accelerator; those without data are of the CPU to them.
    """
    devices = [*torch.utils._foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    places = map(import_module, ("torch.utils._foreach_utils", "torch.optim.optimizer"))
    with ExitStack() as stack:
        for place in places:  # torch.optim hides the latter
            kinds = [*vars(place)["_foreach_supported_types"], fake_tensor.FakeTensor]
            stack.enter_context(patch.object(place, "_foreach_supported_types", kinds))
            stack.enter_context(
                patch.object(place, "_get_foreach_kernels_supported_devices", lambda: devices)
            )
        yield


@contextmanager
def operators_replaced(replaced: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside the ``with`` block operators of torch run these functions for tensors of the CPU.

    Their own implementation is a composite, which autograd looks into; its ``decompose`` is there.

    Args:
        replaced: by the name of an overload in ``aten``, the default one without its name.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in replaced.items():
            library.impl(name, function, "AutogradCPU")
        yield


def forward_number() -> int:
    """The number of the next operation that autograd records on this thread."""
    return int(torch.autograd._get_sequence_nr())


def backward_number() -> int | None:
    """The number of the recorded operation whose backward runs now; None outside a backward."""
    node = backward_node()
    return None if node is None else int(node._sequence_nr())


def backward_node() -> Any:
    """The node of a graph whose backward runs now on this thread; None outside a backward."""
    return torch._C._current_autograd_node()


def storage_address(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one lives.

    Every tensor's ``untyped_storage()`` may be another Python object, and its ``data_ptr()`` is 0
    without memory or data.
    """
    return int(storage._cdata)


class DispatchMode(TorchDispatchMode):
    """A context whose ``__torch_dispatch__`` is asked to run each operation of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __enter__(self) -> Self:
        """Begin to be asked."""
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, *error: Any) -> None:
        """Is asked no more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        return func(*args, **(kwargs or {}))


@contextmanager
def on_values() -> Iterator[None]:
    """Run the operations of the ``with`` block on values, whatever modes are in use.

    The generator of random numbers is restored. Gradients are on, since an LSTM returns a
    workspace only then.
    """
    with (
        _disable_current_modes(),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        warnings.catch_warnings(action="ignore"),
    ):
        yield


def memory_changes(run: Callable[[], object]) -> list[int]:
    """Return the bytes that ``run`` allocates and, as negative numbers, frees, in order.

    Memory of other threads does not count. Without torch's legacy profiler the list is
    empty.
    """
    if not hasattr(torch.autograd, "_enable_profiler_legacy"):
        run()
        return []
    profiler = torch._C._profiler
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.CPU, False, True, False, False, False,
        profiler._ExperimentalConfig(),
    )  # fmt: skip
    torch.autograd._enable_profiler_legacy(config)
    try:
        run()
    finally:
        threads = torch.autograd._disable_profiler_legacy()
    events: list[Any] = [event for thread in threads for event in thread]
    return [each.cpu_memory_usage() for each in events if each.kind() == "memory_alloc"]


FakeTensor = fake_tensor.FakeTensor


class FakeTensors(fake_tensor.FakeTensorMode):
    """A context in which tensors have shape, dtype, device and storage, but no data.

    The rank tensor of a mesh and tensors of ``torch.tensor`` keep their data, since the host reads
    them.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # The mode remembers tensors weakly, and Module.to() refuses parameters with a weak
        # reference.
        converter: Any = self.fake_tensor_converter
        converter.set_tensor_memo = lambda meta, fake: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on shapes."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name == "aten::set_":
            # Through FakeTensorMode the storage would live on for ever.
            with fake_tensor.in_kernel_invocation_manager(self):
                func(*args, **kwargs)
            return args[0]
        if args and isinstance(args[0], FakeTensor):
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not any(is_fake(each) for each in given) and (given or in_mesh()):
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return isinstance(tensor, fake_tensor.FakeTensor)


HOST_READ = torch.ops.aten._local_scalar_dense.default
"""The operator behind ``item()`` and ``float()`` of a tensor."""

_DEVICE = torch.ops.prim.device.default


def answer(func: Any, args: Any) -> Any:
    """The answer to a question that is no operation; None if the mode below has to be asked.

    Reading ``tensor.device`` of a fake tensor is such a question.
    """
    if func is _DEVICE and is_fake(args[0]):
        fake = args[0]
        return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
    return None


_ON_CPU = {  # torch's counter knows no attention of the CPU
    f"aten::_scaled_dot_product_flash_attention_for_cpu{end}": getattr(
        torch.ops.aten, f"_scaled_dot_product_flash_attention{end}"
    )
    for end in ("", "_backward")
}


def flop_formula(func: Any) -> Callable[..., Any] | None:
    """Return the function that counts FLOPs from arguments and ``out_val=``, or None."""
    found = flop_registry.get(_ON_CPU.get(schema_of(func).name, func.overloadpacket))
    return cast("Callable[..., Any] | None", found)


def schema_of(func: Any) -> Any:
    """The schema of an operator: its arguments, and which of them it writes (``_schema``)."""
    return func._schema


def in_mesh() -> bool:
    """Whether torch's mesh of ranks asks."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/distributed/device_mesh.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
