"""Networks and training loops as people have them: several inputs, dict batches, `.logits` and
tuple outputs, losses of their own, mixed precision, schedules and augmenting loaders.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from conftest import assert_same_bits
from flwr.clientapp import ClientApp
from smallapp import CLIENTS, Small, app, data, grid, initial, make
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bayflower import load_personal, strategies
from bayflower.clients import Plug
from bayflower.errors import BayflowerError, ConfigError
from bayflower.flower.fusing import FusedGrid
from bayflower.flower.loop import InProcessGrid, contexts
from bayflower.networks.several import Layout


@dataclass
class Output:
    """What a Hugging Face model returns, by its attributes."""

    logits: torch.Tensor
    hidden_states: tuple = ()


class Words(nn.Module):
    """A classifier of tokens as Hugging Face writes them: keywords in, `.logits` out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.base, self.classifier = (
            nn.Embedding(12, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )

    def forward(self, input_ids, attention_mask, labels=None):
        assert input_ids.dtype == attention_mask.dtype == torch.int64
        mask = attention_mask[..., None].to(self.embed.weight.dtype)
        mean = (self.embed(input_ids) * mask).sum(-2) / mask.sum(-2)
        return Output(self.classifier(torch.relu(self.base(mean))))


def tokens(client: int, number: int = 48):
    """Return tokens whose first third, which the mask shows, tells the class."""
    generator = torch.Generator().manual_seed(client)
    y = torch.arange(number) % 3
    ids = torch.randint(12, (number, 6), generator=generator)
    ids[:, :2] = 4 * y[:, None] + torch.randint(4, (number, 2), generator=generator)
    mask = torch.zeros(number, 6, dtype=torch.int64)
    mask[:, :2] = 1
    return {"input_ids": ids, "attention_mask": mask}, y


class Rows(Dataset):
    """A data set of dicts, one a sample."""

    def __init__(self, x, y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, place):
        return {**{name: part[place] for name, part in self.x.items()}, "labels": self.y[place]}


def parts(context):
    x, y = tokens(int(context.node_config["partition-id"]))
    cut = [
        ({name: part[rows] for name, part in x.items()}, y[rows])
        for rows in (slice(32), slice(32, None))
    ]
    return cut[0], DataLoader(Rows(*cut[1]), batch_size=5)


class Two(nn.Module):
    """Two inputs by position, a float and a token; a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.base, self.head = nn.Embedding(3, 4), nn.Linear(9, 8), nn.Linear(8, 3)

    def forward(self, x, kind):
        assert kind.dtype == torch.int64
        hidden = torch.relu(self.base(torch.cat([x, self.embed(kind)], -1)))
        return self.head(hidden), hidden


def pairs(context):
    (x, y), (x_test, y_test) = data(context)
    return TensorDataset(x, y % 2, y), ((x_test, y_test % 2), y_test)


def personal(strategy) -> float:
    from bayflower.metrics import summarise

    return summarise(strategy.outcome.views["personal"])["accuracy"]


def run(made, kind, model, rounds: int = 2, **more):
    strategy = make(kind, **more)
    strategy.start(grid(made), initial(model), num_rounds=rounds)
    assert strategy.faults == []
    return strategy


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FedMAP", "PFedVMP"])
def test_a_hugging_face_kind_of_network_with_dict_batches(method, tmp_path):
    made = app(method.lower(), tmp_path, Words, data=parts, export=("pt2",))
    kind = getattr(strategies, method)
    more = {"xi": 1.0} if method == "PFedVMP" else {}
    strategy = run(made, kind, Words, 3, lr=0.05, local_epochs=6, **more)
    assert personal(strategy) > 0.8
    folder = next(tmp_path.rglob("personal/card.json")).parent
    x, y = tokens(7)
    found = load_personal(folder, model=Words)
    assert found.score(x, y) > 0.6
    want = found.network(Layout.of(x).pack(x)).softmax(-1)
    torch.testing.assert_close(torch.tensor(found.predict_proba(x)).float(), want)
    program = torch.export.load(folder / "model.pt2").module()  # for any number of samples
    for number in (1, 5):
        rows = Layout.of(x).pack({name: part[:number] for name, part in x.items()})
        got = program(rows)["probabilities"].detach()
        torch.testing.assert_close(got, want[:number].detach())


def test_inputs_by_position_and_a_tuple_as_output(tmp_path):
    made = app("fedmap", tmp_path, Two, data=pairs)
    strategy = run(made, strategies.FedMAP, Two, 2, lr=0.05, local_epochs=5)
    assert personal(strategy) > 0.6


def test_packed_samples_come_back_as_they_were():
    given = (torch.randn(4, 2, 3), torch.randint(9, (4, 5)), torch.rand(4) > 0.5)
    layout = Layout.of(given)
    assert Layout.read(layout.text) == layout
    rows = layout.pack(given)
    assert rows.shape == (4, 12)
    for got, want in zip(layout.unpack(rows), given, strict=True):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype
    with pytest.raises(ConfigError, match=r"expected \(\(2, 3\), \(5,\), \(\)\); give all samples"):
        layout.pack((*given[:2], torch.rand(4, 2)))
    with pytest.raises(ConfigError, match="whole numbers of 16777216 or more beside floats"):
        layout.pack((given[0], given[1] + 2**24, given[2]))
    with pytest.raises(ConfigError, match="has the inputs a, expected 3 without names"):
        layout.pack({"a": given[0]})


def test_data_that_cannot_be_packed_are_named(tmp_path):
    def texts(context):
        loader = DataLoader([{"text": "a b", "x": 1.0, "label": 0}], batch_size=1)
        return loader, loader

    def others(context):
        train, _ = parts(context)
        return train, (train[0]["input_ids"], train[1])

    for wrong, text in (
        (texts, "has 'text' of type list, which are not numbers"),
        (others, "train and test must have the same inputs"),
    ):
        with pytest.raises(BayflowerError, match=text):
            run(app("fedmap", tmp_path, Words, data=wrong), strategies.FedMAP, Words)


# -- losses of one's own -----------------------------------------------------------------------
def focal(logits, y):
    nll = nn.functional.cross_entropy(logits, y, reduction="none")
    return (1 - (-nll).exp()) ** 2 * nll


def test_a_loss_of_ones_own_keeps_the_methods_prior(tmp_path):
    """One step of SGD from theta ≠ gamma: the gradient of the own loss, and that of the prior."""
    steps: dict[int, tuple] = {}

    def train(message, context, plug):
        job = plug.begin(message, context)
        start = {name: value.detach().clone() for name, value in job.moving.items()}
        loss = job.loss(job.train.x, job.train.y, focal)
        loss.backward()
        grads = {name: value.grad.clone() for name, value in job.moving.items()}
        with torch.no_grad():
            for name, value in job.moving.items():
                value -= 0.1 * grads[name]
        if job.round == 2:
            gamma = job.work.memo.params
            steps[job.site.client] = (job.train, start, gamma, grads, float(loss.detach()))
        return job.reply()

    made = own_loop("fedmap", tmp_path, train)
    run(made, strategies.FedMAP, Small, 2, sigma2=0.01)
    assert set(steps) == set(range(CLIENTS))
    for samples, start, gamma, grads, loss in steps.values():
        net = Small()
        net.load_state_dict(start)
        apart = sum((value - gamma[name]).square().sum() for name, value in net.named_parameters())
        want = focal(net(samples.x), samples.y).mean() + apart / 0.02
        want.backward()
        assert float(apart.detach()) > 0
        assert loss == pytest.approx(float(want.detach()), rel=1e-5)
        for name, value in net.named_parameters():
            torch.testing.assert_close(grads[name], value.grad, rtol=1e-4, atol=1e-6)


def test_cross_entropy_as_ones_own_loss_gives_the_same_bits(tmp_path):
    """The loss of `make_client_app`, with and without reduction, and its tests are the method's."""
    found = []
    for number, loss in enumerate((None, nn.CrossEntropyLoss(), lambda a, b: focal(a, b))):
        made = app("fedmap", tmp_path / str(number), loss=loss)
        found.append(run(made, strategies.FedMAP, Small, 2).state)
    assert_same_bits(found[0], found[1])
    assert not torch.equal(found[0].params["head.weight"], found[2].params["head.weight"])


def test_two_losses_are_refused(tmp_path):
    made = app("fedmap", tmp_path, loss=focal)
    with pytest.raises(BayflowerError, match="the app has a loss of its own, and the strategy cla"):
        run(made, strategies.FedMAP, Small, 3, class_weights="client")
    odd = app("fedmap", tmp_path, loss=lambda logits, y: logits)
    with pytest.raises(BayflowerError, match=r"loss returned shape \(8, 3\) for 8 samples"):
        run(odd, strategies.FedMAP, Small)


def test_a_loss_of_ones_own_holds_for_stacked_clients_too(tmp_path):
    """`bayflower try APP --engine fused`: the numbers of the loop; a loss without a number for each
    sample runs one by one.
    """
    found = {}
    for name, kind, loss in (
        ("loop", InProcessGrid, focal),
        ("fused", FusedGrid, focal),
        ("plain", FusedGrid, None),
        ("mean", FusedGrid, nn.CrossEntropyLoss()),
    ):
        where = kind(app("fedmap", tmp_path / name, loss=loss), contexts(range(CLIENTS)))
        strategy = make(strategies.FedMAP, run=name)
        strategy.start(where, initial(), num_rounds=2)
        assert strategy.faults == []
        found[name] = strategy.state.params["head.weight"]
        if kind is FusedGrid:
            assert any("number a sample" in one for one in where.crew.remarks) == (name == "mean")
            where.close()
    torch.testing.assert_close(found["fused"], found["loop"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["plain"], found["mean"], rtol=1e-5, atol=1e-6)
    assert (found["fused"] - found["plain"]).abs().max() > 1e-3


# -- training loops of one's own ---------------------------------------------------------------
def own_loop(method: str, state, train, model=Small, source=data) -> ClientApp:
    plug = Plug(method, model=model, data=source, state=state, export=(), device="cpu")
    made = ClientApp()
    made.query()(plug.query)
    made.evaluate()(plug.evaluate)
    made.train()(lambda message, context: train(message, context, plug))
    return made


class Augmenting(TensorDataset):
    """Samples with fresh noise at every reading, as random augmentation does it."""

    def __getitem__(self, place):
        x, y = super().__getitem__(place)
        return x + 0.05 * torch.randn_like(x), y


@pytest.mark.slow
def test_mixed_precision_a_schedule_and_an_augmenting_loader_in_ones_own_loop(tmp_path):
    """The loss is computed in bfloat16, scaled, and descended by AdamW with a cosine, on samples
    that differ in every epoch; parameters and replies stay float32.
    """
    rates, kinds = [], set()

    def train(message, context, plug):
        job = plug.begin(message, context)
        (x, y), _ = data(context)
        loader = DataLoader(Augmenting(x, y), batch_size=job.training.batch_size, shuffle=True)
        optimizer = torch.optim.AdamW(job.parameters(), lr=0.05 / job.round)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * len(loader))
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(6):
            for rows, labels in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = job.loss(rows, labels)
                    kinds.add(job.model(rows).dtype)
                kinds.add(loss.dtype)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
        rates.append((job.round, optimizer.param_groups[0]["initial_lr"]))
        with torch.autocast("cpu", torch.bfloat16):  # a reply is exact wherever it is made
            return job.reply()

    for method in ("FedMAP", "PFedVMP"):
        made = own_loop(method.lower(), tmp_path / method, train)
        more = {"xi": 1.0} if method == "PFedVMP" else {}
        strategy = run(made, getattr(strategies, method), Small, 2, **more)
        assert personal(strategy) > 0.6
        assert {value.dtype for value in strategy.state.params.values()} == {torch.float32}
    assert kinds == {torch.float32, torch.bfloat16}
    assert set(rates) == {(1, 0.05), (2, 0.025)}


@pytest.mark.slow
def test_several_inputs_in_ones_own_loop(tmp_path):
    """`job.loss` takes dict batches; `job.model` is the network as its author wrote it."""

    def train(message, context, plug):
        job = plug.begin(message, context)
        x, y = tokens(int(context.node_config["partition-id"]))
        optimizer = torch.optim.Adam(job.parameters(), lr=0.05)
        assert isinstance(job.model(**x), Output)
        for _ in range(3):
            for batch in DataLoader(Rows(x, y), batch_size=8, shuffle=True):
                labels = batch.pop("labels")
                optimizer.zero_grad()
                job.loss(batch, labels).backward()
                optimizer.step()
        return job.reply()

    made = own_loop("fedmap", tmp_path, train, Words, parts)
    strategy = run(made, strategies.FedMAP, Words, 2)
    assert personal(strategy) > 0.8
