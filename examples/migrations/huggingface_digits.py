"""A classifier of handwritten digits as users of Hugging Face's Trainer write it. One line is Muster's: use().

    python examples/migrations/huggingface_digits.py --batch-size 64
    torchrun --standalone --nproc-per-node 2 examples/migrations/huggingface_digits.py --batch-size 32

The batch size is that of a worker, so both train on as many samples a step. The model, a small vision transformer, is
built from a configuration: nothing is downloaded. Needs transformers and accelerate.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from muster import huggingface


def datasets():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    samples = [
        {"pixel_values": image, "labels": label} for image, label in zip(images, digits.target.tolist(), strict=True)
    ]
    return samples[:1536], samples[1536:]


def accuracy(predictions):
    return {"accuracy": float(np.mean(predictions.predictions.argmax(1) == predictions.label_ids))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--epochs", type=float, default=15)
    parser.add_argument("--output", default="huggingface-digits", help="folder for checkpoints")
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(42)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
    train_set, test_set = datasets()
    trainer = Trainer(
        ViTForImageClassification(config),
        TrainingArguments(
            args.output,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=3e-3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=accuracy,
    )
    huggingface.use(trainer)
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{type(trainer.model_wrapped).__module__.split('.')[0]}'s {type(trainer.model_wrapped).__name__}")
        print(f"test loss {found['eval_loss']:.4f}, accuracy {found['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
