"""What the samples train in place of a model and data that are downloaded: a BERT of random weights, on two classes."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

VOCAB, LENGTH = 64, 12


def model():
    """The same on every rank and in every run."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **sizes, **still))


def batches(batch_size, samples=64):
    """Tokens of the lower half of the vocabulary are class 0, those of the upper half class 1."""
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(samples) % 2
    tokens = torch.randint(2, VOCAB // 2, (samples, LENGTH), generator=random) + labels[:, None] * (VOCAB // 2 - 2)
    return DataLoader(TensorDataset(tokens, labels), batch_size=batch_size)
