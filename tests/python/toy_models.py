"""Small models for the tests of equal bits. Each maps a micro-batch to a scalar loss; `MODELS` lists them by name.

A model class has `make_batch(generator)`, which draws a micro-batch. All micro-batches of a model have the same shapes.
"""

import torch
import torch.nn.functional as F
from torch import nn

ODD_SIZES = (1, 3, 63, 65, 1023, 1024, 1025, 5000)


class OddParameters(nn.Module):
    """An MLP whose other parameters are of every awkward kind: frozen, tied, unused, empty, 0-dim, of odd sizes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 17)
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.tied = nn.Linear(17, 17)
        self.tied_too = nn.Linear(17, 17, bias=False)
        self.tied_too.weight = self.tied.weight
        self.unused = nn.Linear(5, 7)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.odd = nn.ParameterList(torch.randn(size) for size in ODD_SIZES)
        self.last = nn.Linear(17, 1, bias=False)

    @staticmethod
    def make_batch(generator):
        return torch.randn(3, 12, generator=generator), torch.randn(3, 1, generator=generator)

    def forward(self, batch):
        x, target = batch
        dtype = self.inner.weight.dtype
        x = torch.tanh(self.inner(x.to(dtype)))
        x = x + torch.tanh(self.tied_too(self.frozen(self.tied(x)))) * self.scalar
        y = self.last(x) + self.empty.sum()
        odd = sum(((values * target[0, 0].to(dtype)).sin()).mean() for values in self.odd)
        return F.mse_loss(y.float(), target) + odd.float()


class SometimesUsed(nn.Module):
    """Two branches, of which the micro-batch's sign picks one, so that some micro-batches leave a parameter unused."""

    def __init__(self):
        super().__init__()
        self.shared, self.plus, self.minus = nn.Linear(8, 70), nn.Linear(70, 1), nn.Linear(70, 1)

    @staticmethod
    def make_batch(generator):
        return torch.randn(2, 8, generator=generator)

    def forward(self, x):
        branch = self.plus if x[0, 0] > 0 else self.minus
        return branch(torch.relu(self.shared(x.to(self.shared.weight.dtype)))).float().square().mean()


class Dropout(nn.Module):
    """An MLP with dropout; one layer is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(9, 33), nn.Linear(33, 33), nn.Linear(33, 4)

    @staticmethod
    def make_batch(generator):
        return torch.randn(4, 9, generator=generator), torch.randint(0, 4, (4,), generator=generator)

    def forward(self, batch):
        x, target = batch
        x = F.dropout(torch.relu(self.first(x.to(self.first.weight.dtype))), 0.3, self.training)
        x = F.dropout(torch.relu(self.twice(self.twice(x))), 0.3, self.training)
        return F.cross_entropy(self.last(x).float(), target)


class BatchNormCnn(nn.Module):
    """A CNN with BatchNorm in training mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, stride=2), nn.BatchNorm2d(5), nn.ReLU()
        )
        self.head = nn.Linear(5, 10)

    @staticmethod
    def make_batch(generator):
        return torch.randn(4, 3, 10, 10, generator=generator), torch.randint(0, 10, (4,), generator=generator)

    def forward(self, batch):
        images, target = batch
        x = self.body(images.to(self.head.weight.dtype)).mean(dim=(2, 3))
        return F.cross_entropy(self.head(x).float(), target)


class Lstm(nn.Module):
    """A two-layer LSTM over token embeddings, predicting the next token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 11)
        self.lstm = nn.LSTM(11, 13, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(13, 30)

    @staticmethod
    def make_batch(generator):
        return torch.randint(0, 30, (3, 8), generator=generator)

    def forward(self, tokens):
        x, _ = self.lstm(self.embedding(tokens[:, :-1]))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


class EncoderDecoder(nn.Module):
    """Laid out as T5: an encoder and a decoder share one embedding, which is the output layer too; RMS norms, and one
    relative position bias that all layers of a stack share."""

    def __init__(self, hidden=24, heads=2, layers=2, vocabulary=40):
        super().__init__()
        self.shared = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.ModuleList(_Layer(hidden, heads, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Layer(hidden, heads, cross=True) for _ in range(layers))
        self.encoder_bias, self.decoder_bias = nn.Embedding(15, heads), nn.Embedding(15, heads)
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.shared.weight

    @staticmethod
    def make_batch(generator):
        source, target = (torch.randint(0, 40, (2, n), generator=generator) for n in (8, 7))
        return source, target

    def forward(self, batch):
        source, target = batch
        memory = self.shared(source)
        bias = _relative_bias(self.encoder_bias, source.shape[1])
        for layer in self.encoder:
            memory = layer(memory, bias)
        memory = self.encoder_norm(memory)
        x = self.shared(target[:, :-1])
        length = x.shape[1]
        future = torch.full((length, length), -1e4, dtype=x.dtype).triu(1)
        bias = _relative_bias(self.decoder_bias, length) + future
        for layer in self.decoder:
            x = layer(x, bias, memory)
        logits = self.head(self.decoder_norm(x) * x.shape[-1] ** -0.5)
        return F.cross_entropy(logits.float().flatten(0, 1), target[:, 1:].flatten())


class _Layer(nn.Module):
    def __init__(self, hidden, heads, cross):
        super().__init__()
        self.self_attention = _Attention(hidden, heads)
        self.cross_attention = _Attention(hidden, heads) if cross else None
        self.norm, self.up = nn.RMSNorm(hidden), nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x, bias, memory=None):
        x = x + self.self_attention(x, x, bias)
        if self.cross_attention is not None:
            x = x + self.cross_attention(x, memory, None)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x, memory, bias):
        q, k, v = self.q(self.norm(x)), self.k(memory), self.v(memory)
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(2, 3)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def _relative_bias(table, length):
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    return table(distance + length - 1 if 2 * length - 1 <= 15 else distance.clamp(-7, 7) + 7).permute(2, 0, 1)


MODELS = {
    "odd-parameters": OddParameters,
    "sometimes-used": SometimesUsed,
    "dropout": Dropout,
    "batch-norm-cnn": BatchNormCnn,
    "lstm": Lstm,
    "encoder-decoder": EncoderDecoder,
}


def make(name, *, seed=0):
    """The model of that name, with initial values from `seed`; torch's generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]()


def batches(name, *, steps, micro_batches, seed=0):
    """The model's micro-batches: [step][j], in global order."""
    generator = torch.Generator().manual_seed(seed)
    return [[MODELS[name].make_batch(generator) for _ in range(micro_batches)] for _ in range(steps)]


def parameter_groups(model):
    """Two groups, as in most training scripts: matrices decay, the rest does not and learns at another rate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, rest = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    return [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
