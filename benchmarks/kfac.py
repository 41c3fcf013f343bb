"""A Laplace approximation of a whole network: Kronecker factors of every Linear and Conv2d layer,
and the predictive of the network linearised at its weights. `whole_network.py` measures it beside
the last layer's.

    a, g     a layer's input with a 1 for the bias (D',), and the gradient of a logit or of a column
             S_c (`curvature.py`) at its output (O,); of a convolution one of each at every position
    A, B     Σ_samples Σ_positions a aᵀ / n  and  Σ_samples Σ_c Σ_positions g gᵀ / positions
    λ        precision of the prior N(0, I/λ) over the layer's weights, of the highest evidence

    precision of a layer's weights:   A ⊗ B + λ I = Σ_ij (a_i b_j + λ) (u_i u_iᵀ) ⊗ (v_j v_jᵀ)
    Jacobian of logit k:              J_k = Σ_positions g_k aᵀ  (O, D')
    covariance of the logits:         Σ_layers Σ_ij (VᵀJ_kU)_ji (VᵀJ_lU)_ji / (a_i b_j + λ)

Of the last layer A and B are those of `laplace.py`. For one sample A ⊗ B of a Linear layer is the
layer's block of the generalised Gauss-Newton matrix.

Memory: (D'² + O²) numbers a layer for the factors; a pass over N samples with K logits holds
N·K·D'·O numbers of the largest convolution, and N·K·O of a Linear layer. Layers with D' or O above
LARGEST stay as they are, as do all other layers (BatchNorm, recurrent ones).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from bayflower.maths.curvature import factor
from bayflower.maths.formulas import forward, join, make_plan
from bayflower.maths.gradients import vjp
from bayflower.maths.laplace import LARGEST, best_prior, draws
from bayflower.networks.model import Batch, Model
from bayflower.stacked.rewriting import used
from bayflower.tree import Tensors


class Layer(NamedTuple):
    """A layer with factors."""

    path: str
    shape: tuple[int, ...]  # of its output for one sample
    module: Any


class Factors(NamedTuple):
    """Sums over training samples, float64, by layer."""

    number: Tensor
    inputs: Tensors  # Σ a aᵀ (D', D')
    outputs: Tensors  # Σ g gᵀ / positions (O, O)


def layers_of(model: Model, x: Tensor) -> list[Layer]:
    """Return the layers that have factors."""
    whole = None if x.is_floating_point() else x.dtype
    modules = dict(model.module_for(train=False).named_modules())
    found = []
    for tap in make_plan(model, tuple(x.shape[1:]), whole).taps:
        module = modules[tap.path]
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            size = module.weight[0].numel() + (module.bias is not None)
            if max(size, module.weight.shape[0]) <= LARGEST:
                found.append(Layer(tap.path, tap.shape, module))
    return found


def rows(layer: Layer, a: Tensor) -> Tensor:
    """Return a layer's input as (B, D', positions), with a 1 for the bias."""
    module = layer.module
    if isinstance(module, nn.Linear):
        flat = a[..., None]
    else:
        (high, wide), (down, across) = module.padding, module.stride
        tall, broad = module.kernel_size
        views = nn.functional.pad(a, (wide, wide, high, high))
        views = views.unfold(2, tall, down).unfold(3, broad, across)
        flat = views.permute(0, 1, 4, 5, 2, 3).reshape(a.shape[0], a.shape[1] * tall * broad, -1)
    if module.bias is None:
        return flat
    return torch.cat([flat, torch.ones_like(flat[:, :1])], 1)


def taps(
    model: Model, params: Tensors, buffers: Tensors, x: Tensor, layers: list[Layer]
) -> tuple[Tensor, Any, Tensors]:
    """Return (logits, a function from their gradient to those at the layers' outputs, inputs)."""
    real = next(iter(params.values()))
    probes = {one.path: real.new_zeros(x.shape[0], *one.shape) for one in layers}

    def tapped(probes: Tensors) -> tuple[Tensor, Tensors]:
        return forward(model, params, buffers, x, probes)

    return vjp(tapped, probes, has_aux=True)  # type: ignore[misc,no-any-return]


def see(model: Model, params: Tensors, buffers: Tensors, batch: Batch) -> Factors:
    """Return what a batch adds to the factors; padding adds nothing."""
    layers = layers_of(model, batch.x)
    with used("mapped"):
        logits, pull, inputs = taps(model, params, buffers, batch.x, layers)
        columns = factor(logits, batch.y, "fisher") * batch.mask[:, None]
        grads = vmap(pull)(columns)[0]
    weight = batch.mask.double()
    into, out = {}, {}
    for layer in layers:
        a = rows(layer, inputs[layer.path]).double()
        # (columns, samples, O, positions)
        g = grads[layer.path].double().reshape(*grads[layer.path].shape[:3], -1)
        into[layer.path] = torch.einsum("bit,bjt,b->ij", a, a, weight)
        out[layer.path] = torch.einsum("cbot,cbpt->op", g, g) / g.shape[-1]
    return Factors(weight.sum(), into, out)


def fitted(seen: Factors, params: Tensors) -> Tensors:
    """Return the approximation, by "layer/in", "layer/inverse" and "layer/out"."""
    found = {}
    for path, gram in seen.inputs.items():
        a, into = torch.linalg.eigh(gram / seen.number.clamp(min=1))
        b, out = torch.linalg.eigh(seen.outputs[path])
        known = a.clamp(min=0)[:, None] * b.clamp(min=0)[None]
        weights = params[join(path, "weight")].double().flatten(1)
        if join(path, "bias") in params:
            weights = torch.cat([weights, params[join(path, "bias")].double()[:, None]], 1)
        found[f"{path}/in"], found[f"{path}/out"] = into, out
        found[f"{path}/inverse"] = 1 / (known + best_prior(known, weights))
    return found


def covariance(
    model: Model, params: Tensors, buffers: Tensors, x: Tensor, tensors: Tensors
) -> Tensor:
    """Return the covariance of the logits of each sample (N, C, C) in the linearised network."""
    layers = layers_of(model, x)
    with used("mapped"):
        logits, pull, inputs = taps(model, params, buffers, x, layers)
        one = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        grads = vmap(pull)(one[:, None].expand(-1, *logits.shape))[0]
    total = torch.zeros(*logits.shape, logits.shape[-1], dtype=torch.float64, device=x.device)
    for layer in layers:
        into, inverse, out = (tensors[f"{layer.path}/{name}"] for name in ("in", "inverse", "out"))
        a = rows(layer, inputs[layer.path]).double()
        g = grads[layer.path].double()
        if len(layer.shape) == 1:
            along = g @ out  # (K, B, O)
            share = (a[..., 0] @ into).square() @ inverse
            total = total + torch.einsum("kbo,lbo,bo->bkl", along, along, share)
        else:
            along = torch.einsum("kbot,op->bkpt", g.flatten(3), out)
            turned = torch.einsum("bkpt,bit,ij->bkpj", along, a, into).flatten(2)
            total = total + (turned * inverse.T.reshape(-1)) @ turned.mT
    return total


def offsets(model: Model, params: Tensors, buffers: Tensors, x: Tensor, tensors: Tensors) -> Tensor:
    """Return offsets (J, N, C) of the logits with this covariance."""
    values, vectors = torch.linalg.eigh(covariance(model, params, buffers, x, tensors))
    root = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT
    noise = draws(root.shape[-1]).to(root.device)
    return torch.einsum("nkl,jl->jnk", root, noise)
