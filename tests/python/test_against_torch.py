"""Close to torch's own optimizers, and the memory and traffic that the design promises."""

from __future__ import annotations

import pytest
import torch
import zerocore
from toy_models import batch, make
from zerocore.config import OptimizerConfig, PrecisionConfig, ZeroConfig

STEPS = 50


def torch_optimizer(kind, params):
    if kind == "adamw":
        return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    if kind == "adam":
        return torch.optim.Adam(params, lr=1e-3, weight_decay=0.01)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=0.01, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "adagrad"])
@pytest.mark.parametrize("name", ["lstm", "odd"])
def test_losses_and_parameters_follow_torchs_optimizer(name, kind, world_size):
    """fp32, 50 steps of 2 micro-batches, clipping on: losses within 1e-6 relative, parameters within 1e-4 absolute."""
    model, twin = make(name), make(name)
    optimizer = torch_optimizer(kind, [p for p in twin.parameters() if p.requires_grad])
    config = zerocore.Config(micro_batch_size=1, train_batch_size=2, gradient_clipping=0.1, zero=ZeroConfig(stage=2))
    handed_in = torch_optimizer(kind, [p for p in model.parameters() if p.requires_grad])
    engine = zerocore.Engine(model, config, optimizer=handed_in)
    gas = engine.gradient_accumulation_steps()
    for step in range(STEPS):
        losses = {}
        for j in range(2):
            losses[j] = twin(*batch(name, 2 * step + j, torch.float32))
            (losses[j] / 2).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        for k in range(gas):
            j = k * world_size + engine.rank
            loss = engine(*batch(name, 2 * step + j, torch.float32))
            assert loss.item() == pytest.approx(losses[j].item(), rel=1e-6), f"step {step}"
            engine.backward(loss)
            engine.step()
    for (what, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        if a.numel():
            assert (a - b).abs().max().item() < 1e-4, what


@torch.no_grad()
def lion(params, moments, *, lr, betas, weight_decay):
    """Algorithm 2 of Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023)."""
    for p, m in zip(params, moments, strict=True):
        if p.grad is not None:
            update = (betas[0] * m + (1 - betas[0]) * p.grad).sign()
            m.mul_(betas[1]).add_((1 - betas[1]) * p.grad)
            p.sub_(lr * (update + weight_decay * p))


@pytest.mark.ranks(1, 2)
def test_lion_follows_its_paper(world_size):
    """20 steps: a sign that rounding turns moves a parameter by 2 lr; no more than one in a hundred may."""
    hyper = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    model, twin = make("lstm"), make("lstm")
    moments = [torch.zeros_like(p) for p in twin.parameters()]
    config = zerocore.Config(micro_batch_size=1, train_batch_size=2, optimizer=OptimizerConfig(type="lion", **hyper))
    engine = zerocore.Engine(model, config)
    for step in range(20):
        for j in range(2):
            (twin(*batch("lstm", 2 * step + j, torch.float32)) / 2).backward()
        lion(list(twin.parameters()), moments, **hyper)
        twin.zero_grad()
        for k in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch("lstm", 2 * step + k * world_size + engine.rank, torch.float32)))
            engine.step()
    off = [(a - b).abs().flatten() for a, b in zip(model.parameters(), twin.parameters(), strict=True)]
    off = torch.cat(off)
    assert (off > 1e-5).sum().item() <= off.numel() // 100
    assert off.max().item() < 20 * 2 * hyper["lr"]


@torch.no_grad()
def muon(param, moment, *, lr, beta, weight_decay):
    """Muon as published by K. Jordan (2024), with its products in fp32."""
    moment.lerp_(param.grad, 1 - beta)
    x = param.grad.lerp(moment, beta).flatten(1)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    rows, columns = param.flatten(1).shape
    update = (x.T if tall else x).reshape(param.shape) * max(1, rows / columns) ** 0.5
    param.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["lstm", "wide", "cnn"])
def test_muon_follows_its_publication(name, world_size):
    """20 steps: matrices within 2e-4, of which a step moves an element by about 2e-3."""
    model, twin = make(name), make(name)
    embeddings = [m.weight for m in twin.modules() if isinstance(m, torch.nn.Embedding)]
    matrices = [p for p in twin.parameters() if p.dim() > 1 and not any(p is e for e in embeddings)]
    others = [p for p in twin.parameters() if not any(p is m for m in matrices)]
    moments = [torch.zeros_like(p) for p in matrices]
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    hyper = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "muon_lr": 0.02, "muon_momentum": 0.9}
    config = zerocore.Config(
        micro_batch_size=1,
        train_batch_size=2,
        seed=7,
        optimizer=OptimizerConfig(type="muon", **hyper),
        zero=ZeroConfig(stage=2),
    )
    for module in (*model.modules(), *twin.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    engine = zerocore.Engine(model, config)
    for step in range(20):
        for j in range(2):
            (twin(*batch(name, 2 * step + j, torch.float32)) / 2).backward()
        for p, moment in zip(matrices, moments, strict=True):
            muon(p, moment, lr=0.02, beta=0.9, weight_decay=0.1)
        adamw.step()
        twin.zero_grad()
        for k in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch(name, 2 * step + k * world_size + engine.rank, torch.float32)))
            engine.step()
    for (what, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        # A bias before BatchNorm has a gradient of rounding errors only, of which AdamW makes steps like any others.
        if a.dim() > 1:
            assert (a - b).abs().max().item() < 2e-4, what


class Gpt(torch.nn.Module):
    """The parameters of a GPT of `layers` blocks, in the shapes that matter for padding."""

    def __init__(self, layers=6, hidden=384):
        super().__init__()
        self.tokens = torch.nn.Embedding(256, hidden)
        block = torch.nn.TransformerEncoderLayer
        self.blocks = torch.nn.ModuleList(block(hidden, 6, 4 * hidden, dropout=0.0) for _ in range(layers))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return x.mean()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "p", "master"), [("fp32", 4, 0), ("bf16", 2, 4)])
def test_memory_and_traffic_are_the_formulas(stage, dtype, p, master, world_size):
    """Model states a rank and elements handed to collectives in a step, to 1 % (the rest is padding)."""
    model = Gpt()
    psi = sum(x.numel() for x in model.parameters())
    config = zerocore.Config(
        micro_batch_size=1,
        zero=ZeroConfig(stage=stage),
        precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(),
    )
    engine = zerocore.Engine(model, config)
    report = engine.memory_report()
    n = world_size if stage else 1
    states = sum(report[x] for x in ("parameters", "gradient_accumulator", "master_weights", "optimizer_state"))
    assert states == pytest.approx(psi * (p + (master + 12) / n), rel=0.01)

    before = engine.comm_report()
    engine.backward(engine(torch.zeros(1, 1, dtype=torch.int64)))
    engine.step()
    moved = sum(engine.comm_report()[op]["elements"] - before[op]["elements"] for op in before)
    expected = 2 * psi if world_size > 1 else 0  # one rank hands nothing over but a few flags
    assert moved == pytest.approx(expected, rel=0.01, abs=1000)
