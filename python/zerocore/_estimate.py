"""DeepSpeed's questions about memory before a training, answered by `zerocore plan`'s core, to the byte.

As there, for a model trained in 16 bits with Adam. What comes of offloading is not told, since there is none.
"""

from __future__ import annotations

import copy

import torch

from zerocore._plan import plan, table
from zerocore.config import Config, OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import ConfigError


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints what each rank would hold of a model in stage 2, by name; local.

    Args:
        model: on any device; its values play no part.
        num_gpus_per_node, num_nodes: their product is the number of ranks.
        additional_buffer_factor: no effect: buffers are counted.

    Raises:
        ConfigError, UnsupportedError: an engine could not train it.
    """
    _estimate(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As estimate_zero2_model_states_mem_needs_all_live(), in stage 3."""
    _estimate(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As estimate_zero2_model_states_mem_needs_all_live(), for layers of so many parameters in all."""
    largest = min(int(total_params), ZeroConfig().bucket_numel)
    _estimate(_of_layers(int(total_params), largest), 2, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """As estimate_zero3_model_states_mem_needs_all_live(), for layers as large as the largest, and a rest."""
    _estimate(_of_layers(int(total_params), int(largest_layer_params)), 3, num_gpus_per_node, num_nodes)


def _of_layers(total: int, largest: int) -> torch.nn.Module:
    if not 0 < largest <= total:
        raise ConfigError(
            f"[plan] got {total} parameters, {largest} of them in the largest layer, expected 0 < largest <= total."
        )
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    return torch.nn.Sequential(*(torch.nn.Linear(1, size, bias=False, device="meta") for size in sizes))


def _estimate(model: torch.nn.Module, stage: int, ranks_per_node: int, nodes: int) -> None:
    config = Config(
        micro_batch_size=1,
        precision=PrecisionConfig(dtype="bf16"),
        optimizer=OptimizerConfig(type="adamw"),
        zero=ZeroConfig(stage=stage),
    )
    ranks = ranks_per_node * nodes
    planned = plan(_on_meta(model), config, ranks)
    count = sum(p.numel() for p in model.parameters())
    print(f"{type(model).__name__}: {count:,} parameters; {nodes} nodes of {ranks_per_node} ranks; bf16, AdamW")
    print("\n".join(table({stage: planned})))


def _on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """A copy without memory: planning casts what an engine would cast."""
    there: dict[int, torch.Tensor] = {}
    for param in model.parameters():
        there[id(param)] = torch.nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    for buffer in model.buffers():
        there[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, there)
