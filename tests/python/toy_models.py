"""Small models with odd parameters; each returns its loss. `batch(name, j, dtype)` makes micro-batch number j."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Odd(nn.Module):
    """Frozen, tied, unused, zero-element, 0-dim and odd-sized parameters; one is used in even micro-batches only."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(65, 63)
        self.outer = nn.Linear(63, 65, bias=False)
        self.outer.weight = nn.Parameter(torch.randn(65, 63) / 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(7, 1023)
        self.sometimes = nn.Parameter(torch.ones(65))
        self.frozen = nn.Linear(65, 65)
        self.frozen.requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(1025))
        self.table = nn.Embedding(65, 65)
        self.head = nn.Linear(65, 65, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x, even):
        x = self.frozen(x) + self.table(torch.arange(x.shape[0])) + self.shift[:65] + self.empty.sum()
        x = self.outer(torch.tanh(self.inner(x))) * self.scale
        return (self.head(x + self.sometimes if even else x)).square().mean()


class Wide(nn.Module):
    """Matrices of several norm blocks, and dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(40, 130), nn.GELU(), nn.Dropout(0.25), nn.Linear(130, 40), nn.LayerNorm(40))

    def forward(self, x, target):
        return F.mse_loss(self.net(x), target)


class Cnn(nn.Module):
    """Convolutions and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 3, bias=False), nn.BatchNorm2d(5)
        )

    def forward(self, x):
        return self.net(x).abs().mean(dim=(2, 3)).square().sum(1).mean()


class Lstm(nn.Module):
    """Two recurrent layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.rnn = nn.LSTM(12, 17, num_layers=2, batch_first=True)
        self.out = nn.Linear(17, 11)

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens[:, :-1]))
        return F.cross_entropy(self.out(hidden).float().flatten(0, 1), tokens[:, 1:].flatten())


class T5(nn.Module):
    """Encoder and decoder that share their embeddings with each other and the output, as T5's do."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(19, 16)
        self.encoder_embed, self.decoder_embed = nn.Embedding(19, 16), nn.Embedding(19, 16)
        self.encoder_embed.weight = self.decoder_embed.weight = self.shared.weight
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(16, 19, bias=False)
        self.out.weight = self.shared.weight

    def forward(self, source, target):
        memory = self.encoder(self.encoder_embed(source))
        hidden = self.decoder(self.decoder_embed(target[:, :-1]), memory)
        return F.cross_entropy(self.out(hidden).float().flatten(0, 1), target[:, 1:].flatten())


MODELS = {"odd": Odd, "wide": Wide, "cnn": Cnn, "lstm": Lstm, "t5": T5}


# ZeroConfig keys with which stage 3 keeps nothing whole between uses.
SHARD_ALL = {"persistent_param_numel": 0, "unit_numel": 1, "max_reuse_numel": 0, "prefetch_numel": 0}


def make(name):
    torch.manual_seed(5)
    return MODELS[name]()


def batch(name, j, dtype):
    """Micro-batch j: the same numbers on every rank."""
    random = torch.Generator().manual_seed(1000 + j)

    def floats(*shape):
        return torch.randn(*shape, generator=random).to(dtype)

    if name == "odd":
        return floats(6, 65), j % 2 == 0
    if name == "wide":
        return floats(4, 40), floats(4, 40)
    if name == "cnn":
        return (floats(2, 3, 8, 8),)
    if name == "lstm":
        return (torch.randint(0, 11, (3, 9), generator=random),)
    return torch.randint(0, 19, (2, 7), generator=random), torch.randint(0, 19, (2, 6), generator=random)
