"""Accumulation as in plain PyTorch: the loop divides the loss and calls step() at the boundary. No optimizer named."""

import tiny_bert
import zerocore as deepspeed

model = tiny_bert.model()

ds_config = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}

model_engine, optimizer, _, _ = deepspeed.initialize(config=ds_config, model=model, model_parameters=model.parameters())

for epoch in range(5):
    total = 0.0
    for step, batch in enumerate(tiny_bert.batches(model_engine.train_micro_batch_size_per_gpu())):
        inputs = batch[0].to(model_engine.device)
        labels = batch[1].to(model_engine.device)

        outputs = model_engine(inputs, labels=labels)
        loss = outputs.loss / ds_config["gradient_accumulation_steps"]

        model_engine.backward(loss)

        if (step + 1) % ds_config["gradient_accumulation_steps"] == 0:
            model_engine.step()
            model_engine.zero_grad()
        total += loss.item()
    print(f"epoch {epoch} loss {total:.4f}", flush=True)
print(f"steps {model_engine.global_steps} {model_engine.skipped_steps}")
print(f"params {deepspeed.utils.params_sha256(model)}")
