"""BERT in fp16, without a ZeRO section: the states are whole on every rank."""

import tiny_bert
import zerocore as deepspeed

model = tiny_bert.model()

ds_config = {
    "train_batch_size": 16,
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
}

model_engine, optimizer, _, _ = deepspeed.initialize(config=ds_config, model=model, model_parameters=model.parameters())

for epoch in range(5):
    total = 0.0
    for batch in tiny_bert.batches(model_engine.train_micro_batch_size_per_gpu()):
        loss = model_engine(batch[0].to(model_engine.device), labels=batch[1].to(model_engine.device)).loss
        model_engine.backward(loss)
        model_engine.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total:.4f}", flush=True)
print(f"steps {model_engine.global_steps} {model_engine.skipped_steps}")
print(f"params {deepspeed.utils.params_sha256(model)}")
