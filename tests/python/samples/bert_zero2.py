"""BERT in fp16 with ZeRO 2 and AdamW: a batch goes through engine, backward and step."""

import tiny_bert
import zerocore as deepspeed

model = tiny_bert.model()

ds_config = {
    "train_batch_size": 8,
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
}

model_engine, optimizer, _, _ = deepspeed.initialize(config=ds_config, model=model, model_parameters=model.parameters())

for epoch in range(5):
    total = 0.0
    for batch in tiny_bert.batches(model_engine.train_micro_batch_size_per_gpu()):
        inputs = batch[0].to(model_engine.device)
        labels = batch[1].to(model_engine.device)

        outputs = model_engine(inputs, labels=labels)
        loss = outputs.loss

        model_engine.backward(loss)
        model_engine.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total:.4f}", flush=True)
print(f"steps {model_engine.global_steps} {model_engine.skipped_steps}")
print(f"params {deepspeed.utils.params_sha256(model)}")
