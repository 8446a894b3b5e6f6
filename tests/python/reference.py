"""What training must compute: one process, plain fp32 torch operations, micro-batches in order (docs/numerics.md)."""

from __future__ import annotations

import math

import torch

F64, F32 = torch.float64, torch.float32


def block_square_sums(x):
    """fp64 sums of squares of the 1024-element blocks of a gradient: 16 lanes in order, then added by halves."""
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 1024)).view(-1, 64, 16).to(F64).square()
    lanes = blocks[:, 0].clone()
    for row in range(1, 64):
        lanes += blocks[:, row]
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
    return lanes[:, 0].tolist()


def rounded(value):
    """A double, rounded once to fp32."""
    return torch.tensor(value, dtype=F32)


def root(x):
    """Correctly rounded, as IEEE 754 has it; torch's fp32 sqrt may be off by one unit in the last place."""
    return x.to(F64).sqrt().to(F32)


def power(base, exponent):
    """By squaring, in double."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def product(a, b):
    """A product of matrices, summed in ascending order of the inner index, each operation rounded."""
    out = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        out = out + a[:, k : k + 1] * b[k : k + 1]
    return out


def orthogonalized(matrix, iterations):
    """Muon's Newton-Schulz iterations."""
    norm = math.sqrt(math.fsum(block_square_sums(matrix)))
    x = matrix * rounded(1 / (norm + 1e-7))
    tall = x.shape[0] > x.shape[1]
    x = x.t() if tall else x
    for _ in range(iterations):
        gram = product(x, x.t())
        polynomial = rounded(-4.7750) * gram + rounded(2.0315) * product(gram, gram)
        x = rounded(3.4445) * x + product(polynomial, x)
    return x.t() if tall else x


class Reference:
    """Trains `model` (in its dtype of computation) on losses of micro-batches; `masters` are its fp32 parameters.

    Args:
        hyper: what an optimizer config holds.
        max_norm: gradient clipping; 0 is off.
        scale: the loss scale.
        kept, reduced: the dtypes of the kept parameters and of gradients on their way; None: the model's.
        accumulated: the dtype of sums of gradients.
        matrices: of the type "muon": the numbers of the parameters that are orthogonalised.
    """

    def __init__(
        self,
        model,
        masters,
        *,
        hyper,
        max_norm=0.0,
        scale=1.0,
        kept=None,
        reduced=None,
        accumulated=torch.float32,
        matrices=(),
    ):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = masters
        self.hyper, self.max_norm, self.scale = hyper, max_norm, scale
        self.kept, self.reduced, self.accumulated = kept, reduced, accumulated
        self.matrices = matrices
        self.state = [[torch.zeros_like(m), torch.zeros_like(m)] for m in masters]
        self.steps = [0] * len(masters)

    def step(self, losses, weights=None):
        """One optimizer step over the step's micro-batches; losses: functions that compute each one's loss.

        weights: what each one's loss is the sum over; None: losses are means.
        """
        sums, used = [torch.zeros_like(m) for m in self.masters], [False] * len(self.masters)
        for loss in losses:
            (loss().float() * self.scale).backward()
            for i, p in enumerate(self.params):
                if p.grad is not None:
                    total = sums[i] + p.grad.to(self.reduced or p.dtype).float()
                    sums[i] = total.to(self.accumulated).float() + 0.0  # a sum is never -0
                    used[i], p.grad = True, None
        divisor = self.scale * (len(losses) if weights is None else math.fsum(weights))
        norm = math.sqrt(math.fsum(s for x in sums for s in block_square_sums(x))) / divisor
        clip = min(1.0, self.max_norm / (norm + 1e-6)) if self.max_norm else 1.0
        for i in range(len(sums)):
            if used[i]:
                self.steps[i] += 1
                self.update(i, sums[i] * rounded(clip / divisor))
        with torch.no_grad():
            for p, m in zip(self.params, self.masters, strict=True):
                p.copy_(m.to(self.kept or p.dtype))

    def update(self, i, g):
        h, t, p, (s1, s2) = self.hyper, self.steps[i], self.masters[i], self.state[i]
        if h["type"] == "sgd":
            g = g + rounded(h["weight_decay"]) * p
            direction = g
            if h["momentum"]:
                s1.copy_(g if t == 1 else rounded(h["momentum"]) * s1 + rounded(1 - h["dampening"]) * g)
                direction = g + rounded(h["momentum"]) * s1 if h["nesterov"] else s1
            p.copy_(p - rounded(h["lr"]) * direction)
            return
        if i in self.matrices:
            decay, keep = rounded(h["muon_momentum"]), rounded(1 - h["muon_momentum"])
            s1.copy_(decay * s1 + keep * g)
            direction = keep * g + decay * s1 if h["muon_nesterov"] else s1
            shape = (p.shape[0], -1)
            update = orthogonalized(direction.reshape(shape), h["muon_ns_steps"]).reshape(p.shape)
            rows, columns = p.reshape(shape).shape
            step_size = rounded(h["muon_lr"] * math.sqrt(max(1.0, rows / columns)))
            p.copy_(rounded(1 - h["muon_lr"] * h["weight_decay"]) * p - step_size * update)
            return
        if h["type"] == "adagrad":
            g = g + rounded(h["weight_decay"]) * p
            s1.copy_((rounded(h["initial_accumulator_value"]) if t == 1 else s1) + g * g)
            p.copy_(p - rounded(h["lr"] / (1 + (t - 1) * h["lr_decay"])) * (g / (root(s1) + rounded(h["eps"]))))
            return
        b1, b2 = h["betas"]
        if h["type"] == "lion":
            direction = rounded(b1) * s1 + rounded(1 - b1) * g
            p.copy_(rounded(1 - h["lr"] * h["weight_decay"]) * p - rounded(h["lr"]) * direction.sign())
            s1.copy_(rounded(b2) * s1 + rounded(1 - b2) * g)
            return
        decoupled = h["type"] in ("adamw", "muon")
        g = g + rounded(0.0 if decoupled else h["weight_decay"]) * p
        s1.copy_(rounded(b1) * s1 + rounded(1 - b1) * g)
        s2.copy_(rounded(b2) * s2 + (rounded(1 - b2) * g) * g)
        denominator = root(s2) * rounded(1 / math.sqrt(1 - power(b2, t))) + rounded(h["eps"])
        decay = rounded(1 - h["lr"] * h["weight_decay"] if decoupled else 1.0)
        p.copy_(decay * p - rounded(h["lr"] / (1 - power(b1, t))) * (s1 / denominator))
