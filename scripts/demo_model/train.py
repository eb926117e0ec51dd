"""Train the demo model: a ~10M-parameter ERNIE-4.5 checkpoint and one MTP layer on three chained steps.

Usage: python scripts/demo_model/train.py DATA_DIR OUT_DIR [--main-steps 1050] [--mtp-steps 560]

Needs torch and transformers (training only; the server needs neither) and what corpus.py wrote to DATA_DIR.
Restartable: every 100 steps the weights and the optimiser state go to OUT_DIR/checkpoint-*. Writes OUT_DIR/model/
(Hugging Face layout, bf16) with the MTP layer under mtp/: `ernie.mtp_emb_norm.0`, `ernie.mtp_hidden_norm.0`,
`ernie.mtp_linear_proj.0`, `ernie.mtp_block.0.*`; embedding, final norm and head are the target's.

MTP step k at position i reads the embedding of token i+k and a hidden row (k = 1: the target's, after its final
norm; later: the MTP layer's own output after that same norm), and predicts token i+k+1.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import shutil
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Ernie4_5Config, Ernie4_5ForCausalLM
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5DecoderLayer, Ernie4_5RMSNorm

CONFIG = Ernie4_5Config(
    vocab_size=4096, hidden_size=256, intermediate_size=896, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, rope_theta=500000.0,
    bos_token_id=0, eos_token_id=2, pad_token_id=3, use_bias=False,
)  # fmt: skip
SEQUENCE_LEN, BATCH_SIZE, NUM_CHAINED = 512, 12, 3
MAIN_PEAK_LR, MTP_PEAK_LR, MUON_LR_RATIO = 3e-3, 2e-3, 7.0
CHAIN_LOSS_WEIGHTS = (1.0, 0.6, 0.4)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>",
    "pad_token": "<pad>", "model_max_length": 4096, "clean_up_tokenization_spaces": False,
}  # fmt: skip


def sample_batch(tokens: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Return i64[BATCH_SIZE, SEQUENCE_LEN + NUM_CHAINED + 1] random windows."""
    width = SEQUENCE_LEN + NUM_CHAINED + 1
    starts = rng.integers(0, len(tokens) - width, BATCH_SIZE)
    return torch.from_numpy(np.stack([tokens[s : s + width].astype(np.int64) for s in starts]))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Trainer:
    """Optimises one module: Muon for hidden matrices, AdamW for the rest; warm-up then cosine; restartable."""

    def __init__(self, module: nn.Module, peak_lr: float, num_steps: int, folder: pathlib.Path, name: str) -> None:
        self._module, self._num_steps = module, num_steps
        self._weights, self._state = folder / f"checkpoint-{name}.safetensors", folder / f"checkpoint-{name}.json"
        matrices = [p for n, p in module.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
        chosen = {id(p) for p in matrices}
        rest = [p for p in module.parameters() if id(p) not in chosen]
        muon = torch.optim.Muon(matrices, lr=peak_lr * MUON_LR_RATIO, momentum=0.95, weight_decay=0.01)
        self._optimizers = [muon, torch.optim.AdamW(rest, lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.01)]
        self._peaks = [peak_lr * MUON_LR_RATIO, peak_lr]
        self.step = 0
        if self._state.exists():
            self._restore()

    def update(self, loss: Tensor) -> None:
        progress = min(1.0, (self.step + 1) / 60) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.step / self._num_steps))
        )
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * progress
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self.step += 1
        if self.step % 100 == 0 or self.step == self._num_steps:
            self._save()

    def _slots(self) -> dict[str, Tensor]:
        slots = {}
        for o, optimizer in enumerate(self._optimizers):
            for i, state in optimizer.state_dict()["state"].items():
                slots |= {f"optimizer.{o}.{i}.{k}": torch.as_tensor(v) for k, v in state.items()}
        return slots

    def _save(self) -> None:
        weights = {f"module.{k}": v for k, v in self._module.state_dict().items()}
        save_file({k: v.contiguous().clone() for k, v in (weights | self._slots()).items()}, self._weights)
        self._state.write_text(json.dumps({"step": self.step}))

    def _restore(self) -> None:
        self.step = json.loads(self._state.read_text())["step"]
        saved = load_file(self._weights)
        self._module.load_state_dict({k[7:]: v for k, v in saved.items() if k.startswith("module.")})
        for o, optimizer in enumerate(self._optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for key, value in saved.items():
                if key.startswith(f"optimizer.{o}."):
                    _, _, index, slot = key.split(".")
                    state.setdefault(int(index), {})[slot] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class MtpLayer(nn.Module):
    """One multi-token-prediction layer: concat(norm(embedding), norm(hidden)) -> linear -> decoder block."""

    def __init__(self) -> None:
        super().__init__()
        hidden = CONFIG.hidden_size
        self.emb_norm = Ernie4_5RMSNorm(hidden, CONFIG.rms_norm_eps)
        self.hidden_norm = Ernie4_5RMSNorm(hidden, CONFIG.rms_norm_eps)
        self.linear_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = Ernie4_5DecoderLayer(CONFIG, 0)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, embedding: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = self.linear_proj(torch.cat([self.emb_norm(embedding), self.hidden_norm(hidden)], -1))
        out = self.block(x, position_embeddings=rotary, attention_mask=mask)
        return out[0] if isinstance(out, tuple) else out


def chained(model: Ernie4_5ForCausalLM, mtp: MtpLayer, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return per chained step (loss, i64[B, S] most likely token), teacher-forced.

    Args:
        tokens: i64[B, S + NUM_CHAINED + 1].
    """
    length = tokens.shape[1] - NUM_CHAINED - 1
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    with torch.no_grad(), bf16():
        hidden = model.model(tokens[:, :length]).last_hidden_state
    rotary = model.model.rotary_emb(hidden, torch.arange(length)[None])
    out = []
    for k in range(1, NUM_CHAINED + 1):
        with bf16():
            embedding = model.model.embed_tokens(tokens[:, k : length + k])
            hidden = model.model.norm(mtp(embedding, hidden, rotary, mask.to(hidden.dtype)))
            logits = model.lm_head(hidden)
        target = tokens[:, k + 1 : length + k + 1]
        out.append((cross_entropy(logits, target), logits.argmax(-1)))
    return out


def train_main(model: Ernie4_5ForCausalLM, tokens: np.ndarray, num_steps: int, folder: pathlib.Path) -> None:
    trainer = Trainer(model, MAIN_PEAK_LR, num_steps, folder, "main")
    start = time.time()
    while trainer.step < num_steps:
        window = sample_batch(tokens, np.random.default_rng([0, trainer.step]))[:, : SEQUENCE_LEN + 1]
        with bf16():
            logits = model(window[:, :-1]).logits
        loss = cross_entropy(logits, window[:, 1:])
        trainer.update(loss)
        if trainer.step % 20 == 0:
            print(f"main {trainer.step} loss {loss.item():.3f} {time.time() - start:.0f}s", flush=True)


def train_mtp(
    model: Ernie4_5ForCausalLM, mtp: MtpLayer, tokens: np.ndarray, num_steps: int, folder: pathlib.Path
) -> None:
    trainer = Trainer(mtp, MTP_PEAK_LR, num_steps, folder, "mtp")
    start = time.time()
    while trainer.step < num_steps:
        window = sample_batch(tokens, np.random.default_rng([1, trainer.step]))
        steps = chained(model, mtp, window)
        trainer.update(sum(w * loss for w, (loss, _) in zip(CHAIN_LOSS_WEIGHTS, steps, strict=True)))
        if trainer.step % 20 == 0:
            hits = " ".join(f"{hit.float().mean().item():.3f}" for _, hit in steps)
            print(
                f"mtp {trainer.step} loss {steps[0][0].item():.3f} hits {hits} {time.time() - start:.0f}s", flush=True
            )


@torch.no_grad()
def evaluate(model: Ernie4_5ForCausalLM, mtp: MtpLayer, tokens: np.ndarray) -> dict[str, float]:
    """Measure on held-out files, teacher-forced.

    Returns:
        held_out_loss in nats per token, and per chained step k how often the layer's most likely token is the text's
        (`step_k_hit`) and the target's own (`step_k_accepted`, given that all earlier steps were: what greedy
        verification would accept).
    """
    losses, hits, same = [], [], []
    for i in range(8):
        window = sample_batch(tokens, np.random.default_rng([2, i]))
        with bf16():
            logits = model(window).logits
        losses.append(cross_entropy(logits[:, :SEQUENCE_LEN], window[:, 1 : SEQUENCE_LEN + 1]).item())
        chosen = logits.argmax(-1)
        steps = chained(model, mtp, window)
        hits.append(torch.stack([d == window[:, k + 2 : SEQUENCE_LEN + k + 2] for k, (_, d) in enumerate(steps)]))
        same.append(torch.stack([d == chosen[:, k + 1 : SEQUENCE_LEN + k + 1] for k, (_, d) in enumerate(steps)]))
    hit, accepted = torch.cat(hits, 1).flatten(1), torch.cat(same, 1).flatten(1)
    result = {"held_out_loss": float(np.mean(losses))}
    for k in range(NUM_CHAINED):
        result[f"step_{k + 1}_hit"] = hit[k].float().mean().item()
        result[f"step_{k + 1}_accepted"] = accepted[k][accepted[:k].all(0)].float().mean().item()
    return result


def export(model: Ernie4_5ForCausalLM, mtp: MtpLayer, data: pathlib.Path, out: pathlib.Path) -> None:
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "mtp").mkdir(exist_ok=True)
    names = {}
    for key, value in mtp.to(torch.bfloat16).state_dict().items():
        renamed = key.replace("block.", "block.0.", 1) if key.startswith("block.") else key.replace(".", ".0.", 1)
        names[f"ernie.mtp_{renamed}"] = value.contiguous()
    save_file(names, out / "mtp" / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG.to_diff_dict() | {
        "architectures": ["Ernie4_5_MTPForCausalLM"], "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
        "dtype": "bfloat16",
    }  # fmt: skip
    (out / "mtp" / "config.json").write_text(json.dumps(config, indent=2, default=str, sort_keys=True) + "\n")
    shutil.copy(data / "tokenizer.json", out / "tokenizer.json")
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--main-steps", type=int, default=1050)
    parser.add_argument("--mtp-steps", type=int, default=560)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train, val = (np.fromfile(args.data / f"{name}.bin", dtype=np.uint16) for name in ("train", "val"))
    model, mtp = Ernie4_5ForCausalLM(CONFIG), MtpLayer()
    train_main(model, train, args.main_steps, args.out)
    model.eval().requires_grad_(False)
    train_mtp(model, mtp, train, args.mtp_steps, args.out)
    result = evaluate(model, mtp, val)
    print(json.dumps(result, indent=1))
    (args.out / "evaluation.json").write_text(json.dumps(result, indent=1))
    export(model, mtp, args.data, args.out / "model")


if __name__ == "__main__":
    main()
