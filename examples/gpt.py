"""A byte-level GPT in plain PyTorch. Nothing here knows about zerocore."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # a token is a byte


def rotation(length: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary position embeddings (Su et al. 2021), fp32, (length, width / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns each pair of channels of x, (..., length, width), by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then a GELU MLP."""

    def __init__(self, hidden: int, *, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The block's output for x, (batch, length, hidden), with the tables of rotation()."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2's layout (Radford et al. 2019) with rotary positions and one matrix for the embedding and the output layer.

    Args:
        layers: number of blocks.
        hidden: width, a multiple of 2 heads.
        heads: attention heads a block.
        seq: longest sequence, in tokens.
        vocabulary: number of tokens.
    """

    def __init__(self, *, layers: int, hidden: int, heads: int, seq: int, vocabulary: int = VOCABULARY):
        super().__init__()
        if hidden % (2 * heads):
            raise ValueError(f"hidden must be a multiple of 2 * heads: got hidden {hidden}, heads {heads}.")
        self.seq, self.width = seq, hidden // heads
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads=heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that write into the residual stream start smaller, so that its variance stays near one.
                small = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if small else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Mean cross entropy in nats a token when `targets` is given, else logits.

        Args:
            tokens, targets: int64, (batch, length), length at most `seq`.
        Returns: an fp32 scalar, or fp32 logits (batch, length, vocabulary).
        """
        x = self.tokens(tokens)
        cos, sin = (table.to(x.dtype) for table in rotation(tokens.shape[1], self.width, tokens.device))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.output(self.norm(x)).float()
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, *, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`prompt` continued by `count` sampled bytes."""
        random = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt)])
        for _ in range(count):
            logits = self(tokens[:, -self.seq :])[:, -1] / temperature
            token = torch.multinomial(logits.softmax(-1), 1, generator=random)
            tokens = torch.cat([tokens, token], dim=1)
        return bytes(tokens[0].tolist())


def decay_groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices, none for biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
