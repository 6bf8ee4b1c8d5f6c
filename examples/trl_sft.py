"""TRL's SFTTrainer on packed, balanced batches, trained on the completions alone.

    python examples/trl_sft.py runs/one

Tokenizing, the masking of prompts and chat templates are the SFTTrainer's; `config` says how its
samples are packed. The model and the tokenizer are made here, so that nothing is downloaded: with
one of the Hub, give its name as `model` and leave `processing_class` out.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from multipack import Config
from multipack.integrations.trl import PackedSFTTrainer

WORDS = ["<pad>", "<eos>", *(str(number) for number in range(100))]


def train(folder: Path, *, epochs: float = 2, samples: int = 600) -> PackedSFTTrainer:
    """Train, from the last checkpoint in `folder` if there is one."""
    trainer = PackedSFTTrainer(
        model=LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(WORDS),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        ),
        args=SFTConfig(
            output_dir=str(folder),
            max_length=64,
            completion_only_loss=True,
            num_train_epochs=epochs,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            save_steps=10,
            report_to="none",
            bf16=False,
            use_cpu=True,  # leave it out for GPUs
            dataloader_pin_memory=False,
        ),
        train_dataset=made_up(samples),
        processing_class=tokenizer(),
        config=Config(sequence_len=64, balance_labels=True),
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return trainer


def made_up(samples: int) -> datasets.Dataset:
    """Make prompts of numbers, and completions that count on from the last one."""
    rng = random.Random(0)
    rows = []
    for _ in range(samples):
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 40))]
        answer = [(prompt[-1] + i) % 100 for i in range(1, rng.randint(2, 20))]
        rows.append(
            {"prompt": " ".join(map(str, prompt)), "completion": " " + " ".join(map(str, answer))}
        )
    return datasets.Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each number."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where checkpoints are")
    train(parser.parse_args().folder)
