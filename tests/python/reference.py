"""The oracle: training on one process in plain fp32 torch operations, in the order that docs/numerics.md documents.

Every result must be equal to it bit by bit, whatever the stage, the number of ranks and the bucket size. It shares no
code with the core; scalars are Python doubles, rounded once to fp32.
"""

import math

import torch
from zerocore._random import named_generator


def train(model, optimizer, steps, *, dtype=torch.float32, max_norm=0.0, loss_scale=1.0, seed=1234):
    """Trains `model` in place and returns the steps' gradient norms (before clipping).

    Args:
        model: its forward maps a micro-batch to a loss.
        optimizer: a fresh torch.optim.AdamW, Adam or SGD over the model: groups and hyperparameters are read, it is
            never stepped.
        steps: for each step its micro-batches, in global order.
        dtype: of the model; masters are fp32.
        max_norm: of gradient clipping; 0 switches it off.
        loss_scale: constant.
        seed: names the random numbers of dropout.
    """
    masters = {p: p.detach().float().clone() for group in optimizer.param_groups for p in group["params"]}
    model.to(dtype)
    states = {p: {"step": 0} for p in masters}
    norms = []
    for number, micro_batches in enumerate(steps):
        sums, used = {p: torch.zeros_like(master) for p, master in masters.items()}, set()
        for j, micro_batch in enumerate(micro_batches):
            with named_generator(seed, number, j, 0):
                loss = model(micro_batch)
            (loss if loss_scale == 1 else loss.float() * loss_scale).backward()
            for p in [p for p in masters if p.grad is not None]:
                sums[p] = sums[p] + p.grad.float()
                used.add(p)
                p.grad = None
        divisor = len(micro_batches) * loss_scale
        square_sum = math.fsum(block for total in sums.values() for block in block_square_sums(total))
        norms.append(math.sqrt(square_sum) / divisor)
        if not math.isfinite(square_sum):
            continue
        clip = min(1.0, max_norm / (norms[-1] + 1e-6)) if max_norm > 0 else 1.0
        update = sgd if isinstance(optimizer, torch.optim.SGD) else adam
        for group in optimizer.param_groups:
            for p in [p for p in group["params"] if p in used]:
                states[p]["step"] += 1
                decoupled = isinstance(optimizer, torch.optim.AdamW)
                masters[p] = update(masters[p], sums[p] * fp32(clip / divisor), states[p], group, decoupled)
                p.data.copy_(masters[p])
    return norms


def fp32(value):
    """A double, rounded to fp32 once."""
    return torch.tensor(value, dtype=torch.float32)


def block_square_sums(total):
    """The sum of squares of each block of 1024 elements: 16 lanes in fp64, then the lanes by halves."""
    blocks = torch.nn.functional.pad(total.flatten().double(), (0, -total.numel() % 1024)).view(-1, 64, 16)
    lanes = torch.zeros(len(blocks), 16, dtype=torch.float64)
    for row in range(64):
        lanes = lanes + blocks[:, row] * blocks[:, row]
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    return lanes.flatten().tolist()


def power(base, exponent):
    """base ** exponent by integer squaring."""
    result = 1.0
    while exponent:
        result, base, exponent = result * base if exponent & 1 else result, base * base, exponent >> 1
    return result


def adam(param, grad, state, group, decoupled):
    """AdamW (decoupled) or Adam with L2. Returns the new parameter."""
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    if not decoupled:
        grad = grad + fp32(decay) * param
    state.setdefault("m", torch.zeros_like(param))
    state.setdefault("v", torch.zeros_like(param))
    state["m"] = fp32(beta1) * state["m"] + fp32(1 - beta1) * grad
    state["v"] = fp32(beta2) * state["v"] + (fp32(1 - beta2) * grad) * grad
    step_size = fp32(lr / (1 - power(beta1, state["step"])))
    root = state["v"].double().sqrt().float()  # correctly rounded, which torch's fp32 sqrt (of MKL) is not
    denominator = root * fp32(1 / math.sqrt(1 - power(beta2, state["step"]))) + fp32(group["eps"])
    return fp32(1 - lr * decay if decoupled else 1.0) * param - step_size * (state["m"] / denominator)


def sgd(param, grad, state, group, _):
    """SGD, with momentum and Nesterov momentum. Returns the new parameter."""
    momentum = group["momentum"]
    grad = grad + fp32(group["weight_decay"]) * param
    if momentum:
        first = state["step"] == 1
        kept = grad if first else fp32(momentum) * state["m"] + fp32(1 - group["dampening"]) * grad
        state["m"] = kept
        grad = grad + fp32(momentum) * kept if group["nesterov"] else kept
    return param - fp32(group["lr"]) * grad
