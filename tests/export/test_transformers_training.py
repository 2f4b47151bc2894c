"""transformers' Trainer and PEFT's LoRA train exported models."""

from __future__ import annotations

import pytest
import torch
import transformers

from helpers.exported import CLASSIFIED, write_checkpoint


class Sentences(torch.utils.data.Dataset):
    """Sentences of one length or several, whose class is that of their first word."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict:
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(4, 40, (5 + number % 3,), generator=draw).tolist()
        return {"input_ids": [0, *tokens, 2], "attention_mask": [1] * (len(tokens) + 2), "label": tokens[0] % 3}


@pytest.fixture
def folder(ways):
    """The folder of an exported classifier."""
    write_checkpoint(ways.here, "bpe", classes=3, task=CLASSIFIED)
    ways.export("model.pt")
    return ways / "out"


def opened(folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_saves_and_loads(checkpointing, folder, ways):
    pytest.importorskip("accelerate")
    model, tokenizer = opened(folder), transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    options = transformers.TrainingArguments(
        str(ways / "trained"), max_steps=10, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, save_steps=10, logging_steps=1, gradient_checkpointing=checkpointing, disable_tqdm=True,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    collate = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(
        model, options, train_dataset=Sentences(), eval_dataset=Sentences(), data_collator=collate
    )
    assert not trainer.model_accepts_loss_kwargs  # so that Trainer itself divides the loss by the accumulated batches
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * first
    assert any(not torch.equal(part, before[name]) for name, part in model.state_dict().items())
    again = opened(ways / "trained/checkpoint-10").eval()
    tokens = torch.randint(4, 40, (2, 7))
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)
    ways.convert("trained/checkpoint-10", "back")


def test_lora_trains_and_loads(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        opened(folder), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"])
    )
    batch = torch.utils.data.default_collate([Sentences()[number] for number in range(0, 9, 3)])
    given = {"input_ids": torch.stack(batch["input_ids"], 1), "labels": batch["label"]}
    before = model.get_base_model().roberta.encoder.sentence_encoder.layers[0].self_attn.q_proj.weight.clone()
    optimizer = torch.optim.SGD([part for part in model.parameters() if part.requires_grad], lr=1e-2)
    first = model.eval()(**given).loss.item()
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(**given).loss.backward()
        optimizer.step()
    assert model.eval()(**given).loss.item() < first
    layer = model.get_base_model().roberta.encoder.sentence_encoder.layers[0].self_attn.q_proj
    assert torch.equal(layer.weight, before) and float(layer.lora_B["default"].weight.abs().max()) > 0
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(opened(folder), tmp_path / "adapter").eval()
    expected = model.eval()(given["input_ids"]).logits
    torch.testing.assert_close(again(given["input_ids"]).logits, expected)
    torch.testing.assert_close(again.merge_and_unload()(given["input_ids"]).logits, expected)
