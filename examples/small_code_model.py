"""A small model to try out what changes a model: Llama layers, trained here on Python's own code.

    python examples/small_code_model.py --out work/small

The text is the source of the standard library that runs this script, so that nothing is downloaded;
files of a tenth of its packages are held out. Makes a folder that `AutoModelForCausalLM` and
`AutoTokenizer` load. It writes code that looks like code, and no more: 12 layers, 2.3M weights,
which is about what an hour of two cores can teach anything (ten million tokens).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, LAYERS, HIDDEN, LENGTH = 512, 12, 128, 256
_LEFT_OUT = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "__pycache__",
    "turtledemo",
}


def sources(held_out: bool) -> list[str]:
    """The standard library's files, or those of it that are not trained on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT & set(parts):
            continue
        number = int(hashlib.sha256(parts[0].encode()).hexdigest(), 16) % 10
        if (number == 0) == held_out:
            found.append(path.read_text(encoding="utf-8", errors="ignore"))
    return found


def tokenizer_of(texts: list[str]) -> Any:
    """Byte-level BPE with a vocabulary of 512."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


def windows(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """int64 [n, 256], files one behind the other, cut into pieces."""
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    count = len(ids) // LENGTH
    return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)


def build(seed: int) -> LlamaForCausalLM:
    """Twelve layers with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=352,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def fit(model: Any, pieces: torch.Tensor, tokens: int, batch: int, rate: float, seed: int) -> None:
    """The usual training on the next token."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1)
    steps = max(1, tokens // (batch * LENGTH))
    order = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for step in range(steps):
        ids = pieces[torch.randint(len(pieces), (batch,), generator=order)]
        warm = min(1.0, (step + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (1 - 0.9 * step / steps)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            done = (step + 1) * ids.numel()
            rate_now = done / (time.perf_counter() - start)
            print(
                f"step {step} loss {float(loss.detach()):.3f} {rate_now:.0f} tokens/s", flush=True
            )


@torch.no_grad()
def loss_of(model: Any, pieces: torch.Tensor) -> float:
    """Mean loss a token, in nats."""
    return float(model(input_ids=pieces, labels=pieces, use_cache=False).loss)


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    texts = sources(held_out=False)
    tokenizer = tokenizer_of(texts)
    pieces, held = windows(tokenizer, texts), windows(tokenizer, sources(held_out=True))
    print(f"{pieces.numel():,} tokens to train on, {held.numel():,} held out")
    model = build(args.seed)
    fit(model, pieces, args.tokens, args.batch, args.learning_rate, args.seed)
    print(f"held out: {loss_of(model.eval(), held[:32]):.3f} nats a token")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    used = {k: v for k, v in vars(args).items() if k != "out"}
    (args.out / "training.json").write_text(json.dumps(used, indent=1) + "\n")


if __name__ == "__main__":
    main()
