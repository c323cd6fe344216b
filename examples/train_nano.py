"""Train ``nano``, the embedded byte-level mixture-of-experts language model, and write its checkpoint.

    python examples/train_nano.py --out nano                      # the running interpreter's standard library
    python examples/train_nano.py --minutes 8 --device cuda --out nano
    python examples/train_nano.py --minutes 0.3 --batch 4 --seq 128 --out /tmp/nano   # does it run at all?

The experts are trained for the formats that they are served in: from ``--quantize-from`` of the run on, their weights
pass through MXFP4 and the rows that enter both expert GEMMs through MXFP8, by the very functions that serving uses,
with straight-through gradients. The router's load is balanced by the correction bias alone; there is no auxiliary loss.

Nothing on the GPU path waits for the device inside a step: the rows of each expert stand at offsets that only the
device knows, and every shape is static. The parts are in ``nano_training/``.
"""

from __future__ import annotations

import argparse
import math
import platform
import sysconfig
from pathlib import Path
from typing import Any

import torch
from nano_training.clock import elapsed_seconds, log
from nano_training.data import Corpus
from nano_training.dispatch import count_slots
from nano_training.evaluate import evaluate, measure
from nano_training.export import round_as_checkpoint, write_checkpoint
from nano_training.fake_quantize import ExpertFormat
from nano_training.grouped_matmul import GroupedMatmul, select_grouped_matmul
from nano_training.model import Nano
from nano_training.muon import make_optimizers
from torch.nn import functional

from rankmoe.models.nano_config import NanoConfig


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="directory of sources")
    parser.add_argument("--data-python", help="Python version of --data (default: the running one)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, help="training time, start-up included (8 on cuda, 60 on cpu)")
    parser.add_argument("--batch", type=int, help="sequences a step (64 on cuda, 16 on cpu)")
    parser.add_argument("--seq", type=int, help="bytes a sequence, also the model's context (1024 on cuda, 512 on cpu)")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, help="on every residual branch (0.1 on cuda, 0 on cpu)")
    parser.add_argument("--decay-from", type=float, default=0.3, help="where of the run (0 to 1) the decay begins")
    parser.add_argument("--quantize-from", type=float, default=0.3, help="where MXFP4 x MXFP8 begins")
    parser.add_argument("--bias-update-rate", type=float, default=1e-3, help="step of the correction bias")
    parser.add_argument("--library-share", type=float, default=0.4, help="share of windows outside of test directories")
    parser.add_argument("--eval-bytes", type=int, help="held-out bytes at the end (1,000,000 on cuda, 60,000 on cpu)")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    is_cuda = torch.device(arguments.device).type == "cuda"
    for name, on_cuda, on_cpu in (
        ("minutes", 8.0, 60.0),
        ("batch", 64, 16),
        ("seq", 1024, 512),
        ("dropout", 0.1, 0.0),
        ("eval_bytes", 1_000_000, 60_000),
        ("data_python", platform.python_version(), platform.python_version()),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, on_cuda if is_cuda else on_cpu)
    return arguments


def learning_rate_factor(progress: float, step: int, warmup_steps: int, decay_from: float) -> float:
    """Warm-up by steps, then flat, then linear decay to zero by the fraction of the time that is spent."""
    decay = min(1.0, (1.0 - progress) / (1.0 - decay_from))
    return max(decay, 0.0) * min(1.0, (step + 1) / warmup_steps)


def bias_rate_factor(progress: float) -> float:
    """Large steps of the correction bias while the experts are new, none at the end, when the biases have to hold."""
    return 1.0 + 9.0 * max(0.0, 1.0 - progress / 0.1) if progress < 0.3 else (1.0 - progress) / 0.7


def device_name(device: torch.device) -> str:
    """The accelerator's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def train(
    model: Nano,
    corpus: Corpus,
    grouped_matmul: GroupedMatmul,
    arguments: argparse.Namespace,
    training: dict[str, Any],
) -> None:
    """Train until the time is over; write checkpoints on the way, and steps, tokens and curve into ``training``."""
    device = model.embed_tokens.weight.device
    is_cuda = device.type == "cuda"
    config = model.config
    optimizers = make_optimizers(model, arguments.lr, arguments.weight_decay)
    sampler = torch.Generator(device).manual_seed(arguments.seed)
    batch_sizes = corpus.batch_sizes(arguments.batch, arguments.library_share)
    tokens_per_step = sum(batch_sizes.values()) * arguments.seq
    monitor = next(iter(corpus.held_out.values()))[: max(1, 262_144 // arguments.seq if is_cuda else 4)]
    curve: list[dict[str, float]] = []
    training["curve"] = curve

    begin = elapsed_seconds()
    duration = arguments.minutes * 60 - begin
    report_every, evaluate_every = min(20.0, duration / 8), min(60.0, duration / 3)
    last_report = last_evaluation = last_save = begin
    step, reported_step = 0, 0
    loss_sum = torch.zeros((), device=device)
    recent_counts = torch.zeros(config.num_hidden_layers, config.num_experts, device=device)
    log(f"training for {duration:.0f} s, {arguments.batch} x {arguments.seq} bytes a step")
    while (progress := (elapsed_seconds() - begin) / max(duration, 1e-9)) < 1.0:
        expert_format: ExpertFormat = "mxfp4_mxfp8" if progress >= arguments.quantize_from else "unquantized"
        lr = arguments.lr * learning_rate_factor(progress, step, 100 if is_cuda else 10, arguments.decay_from)
        tokens = corpus.sample(batch_sizes, arguments.seq + 1, sampler)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            logits, topk_ids = model(tokens[:, :-1], expert_format, grouped_matmul)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        expert_counts = count_slots(topk_ids, config.num_experts)
        model.balance(expert_counts, arguments.bias_update_rate * bias_rate_factor(progress))
        loss_sum += loss.detach()
        recent_counts.lerp_(expert_counts.float(), 0.05)
        step += 1
        if is_cuda and step % 8 == 0:
            torch.cuda.synchronize()  # so that the clock that drives the schedule is the device's

        now = elapsed_seconds()
        if now - last_report >= report_every:
            bits = (loss_sum / (step - reported_step)).item() / math.log(2)
            if not math.isfinite(bits):
                raise SystemExit(f"loss: expected a finite value, got {bits} at step {step}")
            rate = (step - reported_step) / (now - last_report)
            load = recent_counts / recent_counts.mean(1, keepdim=True)
            log(
                f"step {step:6d}  train {bits:.4f} bits/byte  lr {lr:.2e}  {rate:.2f} steps/s  "
                f"{rate * tokens_per_step / 1e3:.0f} kB/s  {expert_format}  "
                f"load min {load.min():.2f} max {load.max():.2f}"
            )
            curve.append({"step": step, "seconds": round(now), "train_bits_per_byte": round(bits, 4)})
            loss_sum.zero_()
            last_report, reported_step = now, step
        if now - last_evaluation >= evaluate_every:
            held_out = evaluate(model, monitor, expert_format, grouped_matmul).bits_per_byte
            log(f"step {step:6d}  held out {held_out:.4f} bits/byte ({expert_format}, first {len(monitor)} windows)")
            curve.append({"step": step, "seconds": round(now), "held_out_bits_per_byte": round(held_out, 4)})
            last_evaluation = elapsed_seconds()
        if now - last_save >= arguments.save_every:
            size = write_checkpoint(model, arguments.out, {**training, "steps": step, "is_final": False})
            log(f"checkpoint: {size:,} bytes")
            last_save = elapsed_seconds()

    if is_cuda:
        torch.cuda.synchronize()
    num_tokens = step * tokens_per_step
    training |= {"steps": step, "tokens": num_tokens, "seconds": round(elapsed_seconds(), 1), "is_final": False}
    epochs = num_tokens / sum(documents.tokens.numel() for documents in corpus.train.values())
    log(f"trained {step} steps, {num_tokens:,} bytes ({epochs:.2f} epochs)")


def main() -> None:
    """Train, evaluate, write."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    config = NanoConfig(max_position_embeddings=arguments.seq)
    try:
        corpus = Corpus.read(arguments.data, config.document_separator, arguments.seq + 1, arguments.eval_bytes, device)
    except ValueError as error:
        raise SystemExit(f"--data {error}") from error
    for part, documents in corpus.train.items():
        log(f"{part}: {documents.starts.numel()} files, {documents.tokens.numel():,} bytes")
    log("held out: " + ", ".join(f"{num_files} files of {part}" for part, num_files in corpus.held_out_files.items()))

    model = Nano(config, arguments.dropout).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log(f"{num_parameters:,} parameters on {device_name(device)}, torch {torch.__version__}")
    training: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "data": {
            "python": arguments.data_python,
            "train_bytes": {part: documents.tokens.numel() for part, documents in corpus.train.items()},
            "held_out_files": corpus.held_out_files,
        },
        "parameters": num_parameters,
        "arguments": {
            name: value for name, value in vars(arguments).items() if name not in ("data", "data_python", "out")
        },
    }
    train(model, corpus, select_grouped_matmul(device), arguments, training)
    write_checkpoint(model, arguments.out, training)

    # Measured on what the checkpoint holds, everything in float32: the numbers that serving has to reproduce.
    torch.set_float32_matmul_precision("highest")
    round_as_checkpoint(model)
    training |= {"is_final": True, **measure(model, corpus.held_out), "wall_seconds": round(elapsed_seconds(), 1)}
    size = write_checkpoint(model, arguments.out, training)
    total = sum(path.stat().st_size for path in arguments.out.iterdir())
    log(f"wrote {arguments.out}: model.safetensors {size:,} bytes, all files {total:,} bytes")


if __name__ == "__main__":
    main()
