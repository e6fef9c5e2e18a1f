"""Classify digits with a small convolutional network.

One process:      python train.py
All your GPUs:    torchrun --nproc_per_node=gpu train.py
Two CPU ranks:    torchrun --nproc_per_node=2 train.py
Two machines:     torchrun --nnodes=2 --nproc_per_node=gpu --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 train.py
Your own images:  python train.py --data FOLDER, with one sub-folder per class, or with MNIST's four IDX files
Faster kernels:   python train.py --precision bf16 --channels-last
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import cross_entropy

import ddp_loop as dl
from ddp_loop import datasets, networks


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether each prediction is right, (n,) bool."""
    return logits.argmax(1) == labels


def read_data(name: str) -> tuple[datasets.LabelledImages, ...]:
    """The training and the test images: (N, 1, 28, 28) uint8."""
    if name == "digits":
        return datasets.digits(seed=0).split(0.9)
    if name == "handwritten":
        return datasets.handwritten().split(0.9)
    if not datasets.holds_idx(name):
        return datasets.ImageFolder(name, mode="L", size=(28, 28)).images().split(0.9)
    train, test = datasets.idx_folder(name)
    if train.images.shape[2:] != (28, 28):
        height, width = train.images.shape[2:]
        raise ValueError(
            f"The digit network needs images of 28x28 pixels. Got {height}x{width} in {name}. Resize them, or use a "
            "folder of images, which are resized when they are read."
        )
    return train, test


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify digits.")
    parser.add_argument(
        "--data",
        default="digits",
        metavar="digits|handwritten|FOLDER",
        help="drawn digits; scikit-learn's; a folder of MNIST's IDX files, or of images in one sub-folder per class",
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=128, help="per GPU; on the CPU, of all ranks")
    parser.add_argument("--shards", type=int, help="shards of a mini-batch (default: one per rank)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of products, by autocast")
    parser.add_argument("--channels-last", action="store_true", help="the memory format that convolutions prefer")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model: some 20 s, then faster steps")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    parser.add_argument("--run-dir", help="folder for rows.jsonl; nothing is written without it")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    with dl.join_world(device=arguments.device, seed=arguments.seed, keep_memory=True) as world:
        try:
            with world.rank_zero_first():  # drawn and cached once
                train, test = read_data(arguments.data)
        except (ValueError, ImportError, dl.PeerFailed) as error:
            message = str(error).partition("\n")[0]  # not a peer's traceback
            raise SystemExit(f"--data must be digits, handwritten or a folder. {message}") from error
        memory_format = torch.channels_last if arguments.channels_last else torch.contiguous_format
        model = networks.digit_classifier(len(train.class_names)).to(world.device)
        model.to(memory_format=memory_format)  # type: ignore[call-overload]
        forward = dl.compile_model(model, world) if arguments.compile else model
        bf16 = arguments.precision == "bf16" and dl.use_bfloat16(world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batch_size = dl.scale_batch_size(arguments.batch_size, world)
        batches = dl.Batches(train, batch_size, world, shards=arguments.shards)
        say = (lambda line: None) if arguments.quiet else world.print
        say(
            f"{len(train)} training and {len(test)} test images, {world.size} ranks on {world.device.type}, "
            f"{batches.shards} shards of a mini-batch of {batch_size}"
        )

        state = {"model": model, "optimizer": optimizer}
        watching = {"run_dir": arguments.run_dir, "config": arguments, "progress": not arguments.quiet}
        loop = dl.Loop(batches, arguments.epochs, state=state, **watching)
        for step in loop:
            for images, labels in step:
                with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
                    logits = forward(images).float()
                step.backward(cross_entropy(logits, labels), accuracy=hits(logits, labels))
            step.fold()
            optimizer.step()

        with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
            test_batches = dl.Batches(test, 1000, world, shuffle=False)
            result = dl.evaluate(model, test_batches, accuracy=hits)
            if arguments.run_dir:
                counts = dl.confusion_matrix(model, test_batches, len(test.class_names))
                loop.log_table("confusion", counts, rows=test.class_names, columns=test.class_names)
        say(f"Test accuracy: {result['accuracy']:.4f} of {result['samples']} images")


if __name__ == "__main__":
    main()
