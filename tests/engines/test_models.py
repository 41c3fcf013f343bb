"""The papers' networks: sizes as printed, heads where methods look for them."""

from __future__ import annotations

import pytest
import torch
from conftest import some

from bayflower.errors import ConfigError
from bayflower.networks.papers import MODELS, NETWORKS, build

# FedBPS: LeNet-5 (P = 61,706); He et al. 2016, Table 6: 0.27, 0.46, 0.66 and 0.85 million
SIZES = {
    "lenet5": ((1, 28, 28), 61_706),
    "lenet-wide": ((3, 32, 32), 1_068_298),
    "resnet20": ((3, 32, 32), 269_722),
    "resnet32": ((3, 32, 32), 464_154),
    "resnet44": ((3, 32, 32), 658_586),
    "resnet56": ((3, 32, 32), 853_018),
    # FedNP: the backbone without the classifier, as printed
    "resnet18": ((3, 32, 32), 11_168_832 + 5_130),
}


@pytest.mark.parametrize("name", some(SIZES, set(SIZES) - {"resnet18"}))
def test_networks_have_the_papers_sizes(name):
    shape, size = SIZES[name]
    model = build(name, shape, 10)
    params, buffers = model.initial(0)
    assert model.num_parameters == sum(value.numel() for value in params.values()) == size
    assert {key: tuple(value.shape) for key, value in params.items()} == model.shapes
    assert list(params) == list(model.shapes)
    assert model.head_names == {"head.weight", "head.bias"}
    assert model.coupled == name.startswith("resnet")
    logits, _ = model.forward(params, buffers, torch.randn(2, *shape), train=False)
    assert logits.shape == (2, 10)


def test_a_shortcut_where_maps_double_drops_pixels_and_adds_zeros():
    """With the second normalisation at zero only the shortcut is left
    (He et al. 2016, option A).
    """
    block = build("resnet20", (3, 32, 32), 10).factory().base[6].eval()
    assert block.stride == 2
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 16, 8, 8)
    y = block(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], torch.relu(x[:, :, ::2, ::2]))
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_a_projected_shortcut_is_a_convolution_of_one_pixel():
    """With the second normalisation at zero only the shortcut is left (He et al. 2016, option B);
    equal maps have none.
    """
    base = build("resnet18", (3, 32, 32), 10).factory().base.eval()
    block = base[5]
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 64, 8, 8)
    wanted = (
        torch.einsum("oi,bihw->bohw", block.shortcut[0].weight[:, :, 0, 0], x[:, :, ::2, ::2])
        / (1 + 1e-5) ** 0.5
    )
    assert torch.allclose(block(x), torch.relu(wanted), atol=1e-5)
    assert [part.shortcut is None for part in base[3:11]] == [
        True,
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def test_every_model_that_is_listed_can_be_built():
    assert set(MODELS) == {"auto", *NETWORKS}
    with pytest.raises(ConfigError, match="model resnet20 needs images of at least 16×16"):
        build("resnet20", (1, 8, 8), 10)
