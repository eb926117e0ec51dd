"""Train drafters of every kind for the demo model: EAGLE, EAGLE-3, Medusa, Hydra, an MLP speculator and a draft model.

Usage: python scripts/demo_model/drafters.py OUT_DIR [KIND ...] [--steps 700] [--windows 700]

Needs torch and transformers, and the demo model and its tokenizer, which are in the package. Each kind is trained to
choose what the model chooses, on the model's own distributions over the corpus of corpus.py. Row j of a text reads the
model's hidden row j and token j + 1, and is taught what the model says after token j + 1. Writes OUT_DIR/<kind> in the
layout in which such drafters are published, bf16.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from corpus import NUM_HELD_OUT_FILES, Encoder, source_files
from drafter_modules import (
    DRAFT_VOCAB,
    TAPS,
    VOCAB,
    Drafter,
    DraftModel,
    Eagle,
    Eagle3,
    Hydra,
    Medusa,
    MlpSpeculator,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from train import Trainer
from transformers import Ernie4_5ForCausalLM

MODEL = pathlib.Path(__file__).resolve().parents[2] / "fastdeploy_sd" / "demo_model"
SEQUENCE_LEN, BATCH_SIZE, PEAK_LR = 256, 4, 2e-3
LOSS_WEIGHTS = (1.0, 0.7, 0.5)


class Texts:
    """Windows of the corpus with the model's rows: `rows[layer]` f32[S, H] entering a layer, -1 after the last norm."""

    def __init__(self, model: Ernie4_5ForCausalLM, tokens: np.ndarray, num_windows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, len(tokens) - SEQUENCE_LEN, num_windows)
        self.tokens = torch.from_numpy(np.stack([tokens[s : s + SEQUENCE_LEN].astype(np.int64) for s in starts]))
        self.rows: dict[int, Tensor] = {}
        with torch.no_grad():
            parts = self.tokens.split(20)
            found = [model.model(part, output_hidden_states=True).hidden_states for part in parts]
        for layer in (*TAPS, -1):
            self.rows[layer] = torch.cat([rows[layer].bfloat16() for rows in found])

    def batch(self, indices: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        return self.tokens[indices], {layer: rows[indices].float() for layer, rows in self.rows.items()}


def compared(drafter: Drafter, tokens: Tensor, rows: dict[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return for each draft its loss, and bool[B, S'] whether it is what the model chooses."""
    with torch.no_grad():
        logits = drafter.model_logits(rows[-1][:, 1:])
        chosen = logits.argmax(-1)
        wanted = (logits if drafter.tokens is None else logits[..., drafter.tokens]).softmax(-1)
        known = (
            torch.ones_like(chosen, dtype=torch.bool) if drafter.tokens is None else torch.isin(chosen, drafter.tokens)
        )
    out = []
    for d, taught in enumerate(drafter(tokens, rows)):
        found = taught[:, : taught.shape[1] - d]
        loss = -(wanted[:, d:] * F.log_softmax(found, -1)).sum(-1)
        best = found.detach().argmax(-1)
        best = best if drafter.tokens is None else drafter.tokens[best]
        out.append((loss[known[:, d:]].mean(), best == chosen[:, d:]))
    return out


def train(drafter: Drafter, texts: Texts, num_steps: int, folder: pathlib.Path, name: str) -> None:
    trainer, start = Trainer(drafter, PEAK_LR, num_steps, folder, name), time.time()
    while trainer.step < num_steps:
        rng = np.random.default_rng([3, trainer.step])
        indices = torch.from_numpy(rng.integers(0, len(texts.tokens), BATCH_SIZE))
        drafts = compared(drafter, *texts.batch(indices))
        trainer.update(sum(w * loss for w, (loss, _) in zip(LOSS_WEIGHTS, drafts, strict=False)))
        if trainer.step % 20 == 0:
            right = " ".join(f"{hit.float().mean().item():.3f}" for _, hit in drafts)
            print(
                f"{name} {trainer.step} loss {drafts[0][0].item():.3f} right {right} {time.time() - start:.0f}s",
                flush=True,
            )


@torch.no_grad()
def accepted(drafter: Drafter, texts: Texts) -> list[float]:
    """Return for each draft how often it is what the model chooses after text, given that all before it were."""
    hits = [hit for _, hit in compared(drafter, *texts.batch(torch.arange(len(texts.tokens))))]
    shortest = min(hit.shape[1] for hit in hits)
    right, rates = torch.ones_like(hits[0][:, :shortest]), []
    for hit in hits:
        rates.append((hit[:, :shortest] & right).sum().item() / max(1, right.sum().item()))
        right &= hit[:, :shortest]
    return rates


def corpus(held_out: bool) -> np.ndarray:
    """Return the tokens of the files that train.py trains with, or of those that it holds out."""
    rng, files = random.Random(0), source_files()
    rng.shuffle(files)
    chosen = files[:NUM_HELD_OUT_FILES] if held_out else files[NUM_HELD_OUT_FILES:]
    return Encoder(Tokenizer.from_file(str(MODEL / "tokenizer.json"))).stream([text for _, text in chosen], rng)


def save(drafter: Drafter, folder: pathlib.Path) -> None:
    config, tensors = drafter.export()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2, default=str, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")
    narrow = {n: (t.bfloat16() if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("kinds", nargs="*", help="all where none is named")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--windows", type=int, default=700, help="parts of the corpus to train on")
    args = parser.parse_args()
    model = Ernie4_5ForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False)
    table, tokens = model.model.embed_tokens.weight.detach(), corpus(held_out=False)
    frequent = np.bincount(tokens, minlength=VOCAB).argsort(kind="stable")[::-1][:DRAFT_VOCAB].copy()
    makes = {
        "eagle": Eagle, "eagle3": lambda t: Eagle3(t, torch.from_numpy(np.sort(frequent))), "medusa": Medusa,
        "hydra": Hydra, "mlp_speculator": MlpSpeculator, "draft_model": DraftModel,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    texts, held_out = Texts(model, tokens, args.windows, 0), Texts(model, corpus(held_out=True), 40, 1)
    for kind in args.kinds or makes:
        torch.manual_seed(0)
        drafter = makes[kind](table)
        train(drafter, texts, args.steps, args.out, kind)
        print(kind, "accepted", " ".join(f"{rate:.3f}" for rate in accepted(drafter, held_out)), flush=True)
        save(drafter, args.out / kind)


if __name__ == "__main__":
    main()
