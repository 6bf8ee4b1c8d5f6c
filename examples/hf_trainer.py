"""Hugging Face's Trainer on packed, balanced batches, with evaluation and exact resume.

    python examples/hf_trainer.py runs/one
    torchrun --nproc-per-node 2 examples/hf_trainer.py runs/two

Run again with the same folder, it goes on from the last whole checkpoint, exactly. What is special
is the class, and its `config`; the rest is a Trainer as ever. The samples are made up: numbers,
and an answer that counts on from the last one. Only answers are trained on.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import datasets
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from multipack import Config
from multipack.integrations.hf import PackedTrainer


def train(folder: Path, *, epochs: float = 2, samples: int = 600) -> PackedTrainer:
    """Train, from the last checkpoint in `folder` if there is one, and evaluate."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    trainer = PackedTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            save_steps=10,
            save_total_limit=2,
            logging_steps=10,
            report_to="none",
            use_cpu=True,  # leave it out for GPUs
            dataloader_pin_memory=False,
        ),
        train_dataset=made_up(samples, seed=0),
        eval_dataset=made_up(samples // 10, seed=1),
        config=Config(sequence_len=64, balance_labels=True),
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    print(trainer.evaluate())
    return trainer


def made_up(samples: int, seed: int) -> datasets.Dataset:
    """Make a data set of `input_ids` and `labels`."""
    rng = random.Random(seed)
    rows = []
    for _ in range(samples):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 40))]
        answer = [(prompt[-1] + i) % 100 for i in range(1, rng.randint(2, 20))]
        labels = [-100] * len(prompt) + answer
        rows.append({"input_ids": prompt + answer, "labels": labels})
    return datasets.Dataset.from_list(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where checkpoints are")
    train(parser.parse_args().folder)
