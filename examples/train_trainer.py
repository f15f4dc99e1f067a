"""Hugging Face's Trainer over a plan, with evaluation, metrics, checkpoints, a falling learning rate and clipping:

torchrun --nproc-per-node 2 examples/train_trainer.py plan.json --out trained
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_gpt2

from bapipe.torch.integrations.pipeline_trainer import PipelineArguments, PipelineTrainer


def accuracy(found: Any) -> dict[str, float]:
    """The share of tokens that are predicted from those before."""
    hits = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train, and return what the last evaluation found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="plan.json of examples/tiny_gpt2.py")
    parser.add_argument("--out", default="trained", help="folder for checkpoints and the trained model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stop", type=int, help="leave after so many steps, to go on with --resume")
    parser.add_argument("--batch", type=int, default=8, help="the plan's global batch")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--float64", action="store_true")
    parser.add_argument("--sgd", action="store_true")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    training = PipelineArguments(
        options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        learning_rate=1e-2,
        optim="sgd" if options.sgd else "adamw_torch",
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=options.stop or 10,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = PipelineTrainer(
        tiny_gpt2.make_model(float64=options.float64),
        options.plan,
        args=training,
        train_dataset=tiny_gpt2.Sentences(64),
        eval_dataset=tiny_gpt2.Sentences(12, seed=1),
        compute_metrics=accuracy,
    )
    if options.stop is not None:
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
                control.should_training_stop = state.global_step >= options.stop

        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=options.resume)
    metrics = trainer.evaluate()
    if training.process_index == 0:
        print(f"loss {metrics['eval_loss']:.17g} accuracy {metrics['eval_accuracy']:.17g}", flush=True)
    trainer.save_model()
    trainer.close()
    return metrics


if __name__ == "__main__":
    main()
