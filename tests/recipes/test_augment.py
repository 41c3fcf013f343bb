"""Augmentation: against slow loops with the same places, by what is drawn, and in stacks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import small_prepared
from scipy import stats
from torch.func import vmap
from torch.nn import functional

from bayflower.config import parse
from bayflower.data import batches
from bayflower.errors import ConfigError
from bayflower.networks.model import Batch
from bayflower.recipes import Training, augment
from bayflower.recipes.augment import Augmentation, augmented
from bayflower.recipes.check import checked
from bayflower.recipes.step import of
from bayflower.stacked import chance

ALL = Augmentation(resized_crop=0.2, crop_padding=2, flip=0.5, cutout=3, mixup=0.4)


def images(number: int = 6, height: int = 7, width: int = 9, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(number, 3, height, width, generator=draw, dtype=torch.float64)


def batch(number: int = 6, real: int | None = None, **more) -> Batch:
    mask = torch.ones(number, dtype=torch.float64)
    mask[number if real is None else real :] = 0
    return Batch(images(number, **more), torch.arange(number) % 4, mask)


# -- slow oracles ----------------------------------------------------------------------------------
def test_a_crop_is_that_of_the_padded_image():
    x, pad = images(), 2
    down, right = torch.tensor([0, 1, 2, 3, 4, 2]), torch.tensor([4, 3, 2, 1, 0, 4])
    found = augment.shifted(x, down - pad, right - pad)
    bordered = np.pad(x.numpy(), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    for i in range(len(x)):
        top, left = int(down[i]), int(right[i])
        assert np.array_equal(found[i], bordered[i][:, top : top + 7, left : left + 9])


def test_a_cut_out_square_is_blank():
    x, side = images(), 4
    rows, columns = torch.tensor([0, 1, 3, 6, 5, 2]), torch.tensor([8, 0, 4, 8, 1, 7])
    found = augment.blanked(x, side, rows, columns)
    for i in range(len(x)):
        wanted = x[i].clone()
        for row in range(7):
            for column in range(9):
                below, right = row - int(rows[i]) + side // 2, column - int(columns[i]) + side // 2
                if 0 <= below < side and 0 <= right < side:
                    wanted[:, row, column] = 0
        assert torch.equal(found[i], wanted)


def test_a_rectangle_is_resized_as_torch_does():
    x = images()
    top, left = torch.tensor([0, 1, 3, 6, 0, 2]), torch.tensor([0, 2, 8, 3, 1, 4])
    height, width = torch.tensor([7, 5, 4, 1, 3, 2]), torch.tensor([9, 7, 1, 6, 8, 5])
    found = augment.resized(x, top, left, height, width)
    for i in range(len(x)):
        part = x[
            i : i + 1,
            :,
            int(top[i]) : int(top[i] + height[i]),
            int(left[i]) : int(left[i] + width[i]),
        ]
        wanted = functional.interpolate(part, (7, 9), mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(found[i], wanted, rtol=1e-12, atol=1e-12)


def test_mixing_is_a_mean_of_two():
    x, other = images(), torch.tensor([3, 0, 2, 1, 5, 4])
    found = augment.mixed(x, torch.tensor(0.3, dtype=torch.float64), other)
    for i in range(len(x)):
        torch.testing.assert_close(found[i], 0.3 * x[i] + 0.7 * x[int(other[i])])


# -- what is drawn ---------------------------------------------------------------------------------
def many(plan: Augmentation, x: torch.Tensor, times: int) -> torch.Tensor:
    """The same batch augmented with many keys."""
    mask = torch.ones(len(x), dtype=x.dtype)
    one = Batch(x, torch.zeros(len(x), dtype=torch.int64), mask)

    def once(key):
        with chance.step(key):
            return augmented(plan, one, 2).x

    return vmap(once)(torch.arange(times))


def test_flips_have_their_rate_and_are_independent():
    x = torch.zeros(4, 1, 1, 2, dtype=torch.float64)
    x[..., 0] = 1
    flipped = many(Augmentation(flip=0.3), x, 5000)[:, :, 0, 0, 1].numpy()
    assert abs(flipped.mean() - 0.3) < 4 * math.sqrt(0.21 / flipped.size)
    assert np.abs(np.corrcoef(flipped.T) - np.eye(4)).max() < 4 / math.sqrt(len(flipped))


def test_crops_are_uniform_over_all_places():
    x = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    x[0, 0, 4, 4] = 1  # where the middle goes tells the crop
    found = many(Augmentation(crop_padding=2), x, 5000).flatten(1).argmax(1)
    seen = torch.bincount(found, minlength=81).reshape(9, 9)[2:7, 2:7]
    assert int(seen.sum()) == 5000
    assert stats.chisquare(seen.flatten().numpy()).pvalue > 1e-4


def test_cut_out_squares_are_uniform_over_all_pixels():
    found = many(Augmentation(cutout=1), torch.ones(1, 1, 4, 5, dtype=torch.float64), 4000)
    blank = 1 - found.flatten(1)
    assert torch.equal(blank.sum(1), torch.ones(4000, dtype=torch.float64))
    assert stats.chisquare(blank.sum(0).numpy()).pvalue > 1e-4


def test_rectangles_have_torchvisions_distribution():
    """Against a plain loop with numpy's generator: what torchvision's RandomResizedCrop does."""
    height, width, least = 32, 32, 0.08
    x = torch.zeros(1, 1, height, width)
    draw = np.random.default_rng(0)

    def plainly() -> tuple[int, ...]:
        for _ in range(10):
            area = height * width * draw.uniform(least, 1)
            ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return int(draw.integers(height - h + 1)), int(draw.integers(width - w + 1)), h, w
        return 0, 0, height, width

    def ours(key):
        with chance.step(key):
            return torch.stack(augment.rectangles(x, least))[:, 0]

    found = vmap(ours)(torch.arange(4000)).numpy()
    wanted = np.array([plainly() for _ in range(4000)])
    for column in range(4):
        assert stats.ks_2samp(found[:, column], wanted[:, column]).pvalue > 1e-4
    assert (found[:, 0] + found[:, 2] <= height).all()
    assert (found[:, 1] + found[:, 3] <= width).all()


@pytest.mark.parametrize(("size", "middle"), [((8, 40), (8, 11)), ((40, 8), (11, 8))])
def test_where_no_rectangle_fits_the_middle_is_taken(size, middle):
    x = torch.zeros(500, 1, *size)
    with chance.step(3):
        top, left, h, w = augment.rectangles(x, 1.0)  # the whole area never fits
    assert set(zip(h.tolist(), w.tolist(), strict=True)) == {middle}
    assert {int(one) for one in top} == {(size[0] - middle[0]) // 2}
    assert {int(one) for one in left} == {(size[1] - middle[1]) // 2}


@pytest.mark.parametrize("shape", [0.1, 0.4, 1.0, 4.0])
def test_shares_are_beta_distributed(shape):
    def once(key):
        with chance.step(key):
            return augment.beta(shape, torch.device("cpu"))

    found = vmap(once)(torch.arange(6000)).numpy()
    assert stats.kstest(found, stats.beta(shape, shape).cdf).pvalue > 1e-4


def test_partners_are_uniform_permutations_of_the_real_samples():
    mask = torch.tensor([1.0, 1, 1, 0, 0])

    def once(key):
        with chance.step(key):
            return augment.partners(mask)

    found = vmap(once)(torch.arange(6000))
    assert set(map(tuple, found[:, 3:].tolist())) == {(3, 4)}
    _, counts = np.unique(found[:, :3].numpy(), axis=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-4


def keys_of(**changes) -> int:
    """The key of a batch's augmentation, as both engines make it."""
    known = {"seed": 0, "client": 1, "round": 2, "stage": "augment/train/local", **changes}
    step, group = known.pop("step", 3), known.pop("group", 0)
    return chance.part(chance.further_number(batches.layers_key(**known), step), group)


def test_clients_rounds_steps_and_batches_draw_apart():
    cases = [
        {},
        {"client": 2},
        {"round": 3},
        {"step": 4},
        {"group": 1},
        {"seed": 1},
        {"stage": "augment/new/fit"},
    ]
    drawn = []
    for case in cases:
        with chance.step(keys_of(**case)):
            drawn.append(chance.uniform((2000,), torch.device("cpu")))
    found = np.corrcoef(torch.stack(drawn).numpy())
    assert np.abs(found - np.eye(len(cases))).max() < 4 / math.sqrt(2000)


def test_one_recipe_does_not_change_anothers_numbers():
    one = batch()
    flips = ALL._replace(resized_crop=0, crop_padding=0, cutout=0, mixup=0)
    with chance.step(5):
        alone = augmented(flips, one, 4).x
    with chance.step(5):
        both = augmented(flips._replace(cutout=3), one, 4).x
    kept = both != 0
    assert torch.equal(alone[kept], both[kept])


# -- stacks and padding ----------------------------------------------------------------------------
def test_a_stack_draws_what_each_client_draws_alone():
    recipe = of(Training(**ALL._asdict()), 4)
    first, second = batch(), batch(seed=1)
    stacked = Batch(*(torch.stack(pair) for pair in zip(first, second, strict=True)))
    keys = torch.tensor([keys_of(), keys_of(client=2)])
    found = vmap(recipe.groups)(keys, (stacked, stacked))
    for client, (key, own) in enumerate(zip(keys.tolist(), (first, second), strict=True)):
        alone = recipe.groups(key, (own, own))
        for group in range(2):
            assert torch.equal(found[group].x[client], alone[group].x)
            assert torch.equal(found[group].y[client], alone[group].y)
        assert not torch.equal(alone[0].x, alone[1].x)


def test_padding_changes_nothing_and_is_not_mixed_in():
    recipe, short = of(Training(**ALL._asdict()), 4), batch(4)
    padded = Batch(
        torch.cat([short.x, torch.full((3, 3, 7, 9), 1e6, dtype=torch.float64)]),
        torch.cat([short.y, torch.zeros(3, dtype=torch.int64)]),
        torch.cat([short.mask, torch.zeros(3, dtype=torch.float64)]),
    )
    alone, among = recipe.augmented(7, short), recipe.augmented(7, padded)
    assert torch.equal(alone.x, among.x[:4])
    assert torch.equal(alone.y, among.y[:4])
    assert float(among.x[:4].abs().max()) < 100


def test_mixed_labels_are_shares():
    found = of(Training(mixup=1.0), 4).augmented(1, batch())
    assert found.y.shape == (6, 4)
    torch.testing.assert_close(found.y.sum(1), torch.ones(6, dtype=torch.float64))
    alone = of(Training(mixup=1.0), 4).augmented(1, batch(1))
    torch.testing.assert_close(alone.x, batch(1).x)  # a single sample has no other


def test_what_is_off_returns_the_same_tensors():
    recipe = of(Training(), 4)
    assert not recipe.augments
    assert not Augmentation().on
    one = batch()
    with chance.step(0):
        assert all(a is b for a, b in zip(augmented(Augmentation(), one, 4), one, strict=True))


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["crop_padding", "flip", "resized_crop", "cutout"])
def test_images_are_needed_and_this_is_said_at_the_start(name):
    given = {name: 1}
    with pytest.raises(ConfigError, match=rf"^{name} needs images of shape"):
        small_prepared("fedavg", dataset="synthetic", keep=1, **given)
    with pytest.raises(ConfigError, match=rf"^{name} needs images of shape"):
        checked(Training(**given), (28, 28), 10)
    checked(Training(**given), (1, 8, 8), 10)


def test_mixup_takes_tables_and_refuses_tokens():
    checked(Training(mixup=0.2), (5,), 2)
    tokens = Batch(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3).long(), torch.ones(3))
    with pytest.raises(ConfigError, match="tokens, cannot be mixed"):
        of(Training(mixup=0.2), 2).augmented(0, tokens)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"flip": 1.5}, r"flip must be in \[0, 1\]"),
        ({"resized_crop": -0.1}, r"resized_crop must be in \[0, 1\]"),
        ({"mixup": -1}, "mixup must be finite and not negative"),
        ({"crop_padding": -1}, "crop_padding must be at least 0"),
        ({"cutout": 1.5}, "cutout must be a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        parse("fedavg", values)


def test_squares_and_borders_must_fit_the_images():
    with pytest.raises(ConfigError, match="cutout must be at most 8"):
        small_prepared("fedavg", cutout=9)
    with pytest.raises(ConfigError, match="crop_padding must be at most 8"):
        small_prepared("fedavg", crop_padding=9)
