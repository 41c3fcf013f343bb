"""The check of a user's network with a batch of its data before training; errors name the layer at
fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from ..errors import BayflowerError, ConfigError, in_one_line
from ..stacked import chance
from ..tasks import Task
from ..tasks.saved import to_json
from ..tree import Tensors
from .left import Left
from .mixing import try_out
from .model import Model
from .parts import persistent, uncompiled
from .several import Layout, one_tensor

FEW = 4  # samples of the trial pass
# layers that make probabilities: ours come after the network
ENDS = (nn.Softmax, nn.Softmax2d, nn.Sigmoid)
LARGE = 100.0  # weights with which logits are far outside of 0…1


def checked_model(
    factory: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    head: str | Sequence[str] | None = None,
    name: str = "",
    layout: Layout | None = None,
    task: Task | None = None,
) -> Model:
    """Return the network as a Model with as many classes as it has outputs, or for a task without
    classes; raise ConfigError if it cannot be trained on (x, y). `layout` says what x is packed
    from, for several inputs.
    """
    first = make(factory)
    name = name or type(first).__name__
    check_layers(first, name)
    model = Model(lambda: one_tensor(make(factory), layout), 2, name, head)
    model.layout = layout
    if task is not None and not task.classes:
        check_some(y)
        model = Model(model.factory, to_json(task).get("size", 1), name, head, task)
        model.layout = layout
        check_fit(model, x)
        return model
    model.look_for_head(x[:2])
    _ = model.head_layers  # raises if the head's name does not exist, for every method
    logits, last = trial(model, x[:FEW])
    model.num_classes = max(logits.shape[1], 2)
    check_labels(y, logits.shape[1], last)
    try_out(model, x)
    return model


def check_fit(model: Model, x: Tensor) -> None:
    """Raise unless a network of one's own can be trained on samples x with the classes of the
    data, or for the task.
    """
    check_layers(model.module_for(False), model.name)
    _ = model.head_layers  # raises if the head's name does not exist, for every method
    logits, last = trial(model, x[:FEW])
    try_out(model, x)
    task = model.task
    outputs, classes = logits.shape[1] - len(task.extra()), model.num_classes
    if not task.classes:
        if outputs != task.network:
            raise ConfigError(
                f"layer {last!r} of model {model.name} has {outputs} outputs, but {needs(task)} "
                f"needs {task.network}; give it {task.network} (a parameter called num_outputs is "
                "filled in)"
            )
        return
    if outputs != classes and not (outputs == 1 and classes == 2):
        raise ConfigError(
            f"layer {last!r} of model {model.name} has {outputs} outputs, but the data have "
            f"{classes} classes; give it {classes} (a parameter called num_classes is filled in), "
            "or say num_classes if some class does not occur"
        )


def check_single(model: Model, x: Tensor) -> None:
    """Raise unless a network of one's own can predict for one sample alone."""
    start = model.initial(0, x.dtype if x.is_floating_point() else torch.get_default_dtype())
    with alone(model), torch.no_grad(), torch.random.fork_rng(devices=[]), chance.step(0):
        model.forward(*start, x[:1].clone(), False)


@contextmanager
def alone(model: Model) -> Iterator[None]:
    """Say in one line why a network fails here, where it gets one sample alone."""
    try:
        yield
    except BayflowerError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model {model.name} cannot predict for one sample alone: {in_one_line(error, 200)}; "
            "keep the samples' dimension in forward(), e.g. flatten(1) instead of squeeze()"
        ) from error


def needs(task: Task) -> str:
    """Return a task in the words of settings, as far as they decide the outputs."""
    known = to_json(task)
    more = {
        "survival": f"likelihood={known['likelihood']}",
        "regression": f"noise={known.get('noise')}",
        "labels": f"{known.get('size')} labels",
    }
    return f"task={task.name}" + (f" with {more[task.name]}" if task.name in more else "")


def check_layers(module: nn.Module, name: str) -> None:
    """Raise if a network has layers whose shapes are not known yet, complex parameters, or none, or
    if it is wrapped in a way that hides its layers.
    """
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigError(
            f"model {name} is a {type(module).__name__}; give the network inside it: clients are "
            "spread over devices here"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(f"model {name} is scripted; give the network without torch.jit")
    if uncompiled(module) is not module:
        raise ConfigError(
            f"model {name} is compiled; give the network without torch.compile: clients are "
            "trained in stacks here"
        )
    for path, value in module.named_parameters():
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise ConfigError(
                f"parameter {path!r} of model {name} has a hook on its gradient, which nothing "
                "would call here; change the weight in forward(), e.g. weight * mask"
            )
        if value.is_complex() and value.requires_grad:
            raise ConfigError(
                f"parameter {path!r} of model {name} is complex; keep it as real numbers (…, 2), "
                "and use torch.view_as_complex in forward()"
            )
    for path, buffer in persistent(module).items():
        if buffer.is_complex() or buffer.layout != torch.strided:
            kind = "complex" if buffer.is_complex() else "sparse"
            raise ConfigError(
                f"buffer {path!r} of model {name} is {kind}, and so cannot be sent; register it "
                f"with persistent=False, or as {'real' if kind == 'complex' else 'dense'} numbers"
            )
    for path, layer in module.named_modules():
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise ConfigError(
                f"layer {path!r} ({type(layer).__name__}) is lazy: its shape is unknown before "
                "the first call; give its sizes"
            )
        if any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            raise ConfigError(
                f"layer {path!r} has its weights made anew before each call by "
                "torch.nn.utils.spectral_norm, which keeps them outside of the network's state; "
                "take torch.nn.utils.parametrizations.spectral_norm"
            )
    if not list(module.parameters()):
        raise ConfigError(f"model {name} has no parameters; nothing could be learned")


def make(factory: Callable[[], nn.Module]) -> nn.Module:
    """Return a module of the factory."""
    if isinstance(factory, nn.Module):
        raise ConfigError(
            f"model must be a factory, got a {type(factory).__name__}; pass the class, or lambda: "
            f"{type(factory).__name__}(…)"
        )
    if not callable(factory):
        raise ConfigError(
            f"model must be a function that returns a torch.nn.Module, got {type(factory).__name__}"
        )
    module = factory()
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model() must return a torch.nn.Module, got {type(module).__name__}")
    return module


def trial(model: Model, x: Tensor) -> tuple[Tensor, str]:
    """Return (the logits of a few samples, the layer they come from), tried in both modes; nothing
    may be remembered between calls.
    """
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    params, buffers = (
        {name: value.to(x.device) for name, value in part.items()}
        for part in model.initial(0, dtype)
    )
    logits, last, written = torch.empty(0), "", dict[str, Any]()
    for train in (False, True):
        module = model.module_for(train)
        model.fixed(next(iter(params.values())))
        left = Left(model, module)

        def passed(train: bool = train) -> Any:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), chance.step(0):
                return model.forward(params, buffers, x.clone(), train)[0]

        with watched(module) as calls:
            try:
                logits = passed()
            except Exception as error:
                where = (
                    f"layer {calls.inside[-1]!r} ({describe(module, calls.inside[-1])})"
                    if calls.inside
                    else f"model {model.name}"
                )
                reason = in_one_line(error, 200)
                raise ConfigError(
                    f"{where} cannot take a batch of shape {tuple(x.shape)}: {reason}; "
                    f"{remedy(module, x, calls.inside[-1] if calls.inside else '')}"
                ) from error
        last = calls.last
        written |= left.check(logits, passed)
        check_logits(logits, x, module, model, last)
    model.manner.left |= written
    if model.task.classes or model.task.name == "labels":
        check_open(model, params, buffers, x)
    return logits, last


def remedy(module: nn.Module, x: Tensor, path: str) -> str:
    """Return what to do about a pass that failed in the layer at `path`."""
    layer = module.get_submodule(path)
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if x.is_floating_point():
            return (
                "inputs were read as measurements; whole numbers such as tokens reach the network "
                "as they are from arrays in Python, or from an .npz file with the array plain=True"
            )
        if not 0 <= int(x.min()) <= int(x.max()) < layer.num_embeddings:
            return (
                f"inputs go from {int(x.min())} to {int(x.max())}; they must be at least 0 and "
                "below its num_embeddings"
            )
    for name, value in module.named_parameters():
        if value.is_floating_point() and value.dtype != torch.get_default_dtype():
            kind = str(value.dtype).removeprefix("torch.")
            return (
                f"parameter {name!r} was made as {kind}, but parameters have the dtype of the run: "
                "leave conversions out of the network, and set dtype or bf16"
            )
    return f"build the network for samples of shape {tuple(x.shape[1:])}"


def check_logits(logits: Any, x: Tensor, module: nn.Module, model: Model, last: str) -> None:
    """Raise unless the output is one row of logits a sample."""
    name, wanted = model.name, "(samples, classes), or (samples, 1) for two classes"
    if not model.task.classes:
        wanted = f"(samples, {model.task.network}) for task={model.task.name}"
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"model {name} returns a {type(logits).__name__} without logits; forward() must return "
            "the logits (samples, classes), alone, as .logits, or as the first of a tuple"
        )
    if logits.ndim != 2 or logits.shape[0] != len(x) or not logits.is_floating_point():
        raise ConfigError(
            f"layer {last!r} of model {name} gives {tuple(logits.shape)} for {len(x)} samples; "
            f"it must give {wanted}"
        )
    if not bool(logits.isfinite().all()):
        what = "the samples have" if not bool(x.isfinite().all()) else f"model {name} gives"
        raise ConfigError(
            f"{what} values that are not finite (NaN or infinite), tried on {len(x)} samples; "
            "fill in missing values, and look for divisions and logarithms in forward()"
        )
    end = module.get_submodule(last) if last else module
    if isinstance(end, ENDS):
        raise ConfigError(
            f"layer {last!r} of model {name} is a {type(end).__name__}; leave it out: the network "
            "must give logits"
        )


def check_open(model: Model, params: Tensors, buffers: Tensors, x: Tensor) -> None:
    """Raise if the outputs stay within 0…1 even with large random weights in the head: forward()
    ends in a softmax or a sigmoid that is no layer.
    """
    try:
        names = sorted(model.head_names)
    except ConfigError:  # it has none, or none that is trained: only some methods need one
        return
    draw = torch.Generator().manual_seed(0)
    large = {
        name: (LARGE * torch.randn(params[name].shape, generator=draw)).to(params[name])
        for name in names
    }
    with torch.no_grad(), torch.random.fork_rng(devices=[]), chance.step(0):
        found, _ = model.forward({**params, **large}, buffers, x.clone(), False)
    if bool(((found >= 0) & (found <= 1)).all()):
        raise ConfigError(
            f"model {model.name} gives numbers from 0 to 1 whatever its weights are: forward() "
            "ends in a softmax or a sigmoid; leave it out: the network must give logits"
        )


def check_labels(y: Tensor, outputs: int, last: str) -> None:
    """Raise unless the labels are class numbers for which there are outputs."""
    if y.ndim != 1 or y.is_floating_point() or y.is_complex():
        raise ConfigError(
            f"labels must be whole numbers, one for each sample, got {y.dtype} of shape "
            f"{tuple(y.shape)}; number the classes from 0"
        )
    check_some(y)
    low, high, classes = int(y.min()), int(y.max()), max(outputs, 2)
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        meaning = f"{outputs} output{'s' if outputs > 1 else ', for two classes'}"
        raise ConfigError(
            f"label {wrong} has no output: layer {last!r} has {meaning}, so labels must be in "
            f"0…{classes - 1}"
        )


def check_some(y: Tensor) -> None:
    """Raise unless there are samples."""
    if not len(y):
        raise ConfigError("the training data have no samples; every client needs at least one")


def describe(module: nn.Module, path: str) -> str:
    """Return a layer in a few words."""
    layer = module.get_submodule(path) if path else module
    text = repr(layer)
    return text if "\n" not in text and len(text) < 80 else type(layer).__name__


class Calls:
    """Which layers are running, innermost last, and which one ended last."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.last = ""


@contextmanager
def watched(module: nn.Module) -> Iterator[Calls]:
    """Watch the layers of a module while it runs. Scripted ones cannot be watched; where there are
    some, nobody knows which layer ended last.
    """
    calls, handles = Calls(), []
    plain = [
        (path, part)
        for path, part in module.named_modules()
        if not isinstance(part, torch.jit.ScriptModule)
    ]
    known = len(plain) == len(list(module.modules()))

    def leave(path: str, leaf: bool) -> None:
        calls.inside.pop()
        if leaf and known:
            calls.last = path

    for path, part in plain:
        if path:
            leaf = not any(True for _ in part.children())
            handles.append(
                part.register_forward_pre_hook(lambda *_, path=path: calls.inside.append(path))
            )  # type: ignore[misc]
            handles.append(
                part.register_forward_hook(lambda *_, path=path, leaf=leaf: leave(path, leaf))
            )  # type: ignore[misc]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
