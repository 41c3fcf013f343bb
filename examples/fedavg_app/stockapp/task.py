"""stockapp: the network, the data, training and testing."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small CNN for 8×8 digits."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the loaders of one partition; labels are skewed by sorting before the split."""
    digits = load_digits()
    order = np.argsort(digits.target, kind="stable")
    mixed = np.random.default_rng(0).permutation(len(order))
    half = len(order) // 2
    order = np.concatenate([order[np.sort(mixed[:half])], order[mixed[half:]]])
    mine = np.concatenate(
        [
            np.array_split(part, num_partitions)[partition_id]
            for part in (order[:half], order[half:])
        ]
    )
    mine = np.random.default_rng(1).permutation(mine)
    x = torch.tensor(digits.images[mine] / 16, dtype=torch.float32)[:, None]
    y = torch.tensor(digits.target[mine])
    cut = len(y) * 4 // 5
    train = DataLoader(TensorDataset(x[:cut], y[:cut]), batch_size=batch_size, shuffle=True)
    return train, DataLoader(TensorDataset(x[cut:], y[cut:]), batch_size=batch_size)


def train(net, trainloader, epochs, lr, device):
    """Train the model on the training set."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return loss and accuracy on the test set."""
    net.to(device).eval()
    correct, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images.to(device))
            loss += F.cross_entropy(outputs, labels.to(device), reduction="sum").item()
            correct += (outputs.argmax(1) == labels.to(device)).sum().item()
            count += len(labels)
    return loss / count, correct / count
