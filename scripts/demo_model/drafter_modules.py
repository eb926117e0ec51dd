"""What drafters.py trains: drafters of every kind, and how their files are laid out.

Row j of a text reads the model's hidden row j and token j + 1, and drafts what the model says after token j + 1.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCAB = 256, 4096
TAPS = (3, 6)  # the layers whose inputs EAGLE-3 reads
DRAFT_VOCAB, INNER_DIM, DRAFT_HIDDEN = 256, 32, 96
NUM_HEADS, HEAD_DIM, INTERMEDIATE, EPS, ROPE_THETA = 2, 32, 64, 1e-6, 10_000.0


class Drafter(nn.Module):
    """Drafts `num_drafts` tokens per row; `table` f32[V, H] is the model's embedding and output head."""

    num_drafts = 3
    tokens: Tensor | None = None  # which of the model's tokens it drafts, None = all

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = [table]  # no parameter of its own

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[0][tokens]

    def model_logits(self, rows: Tensor) -> Tensor:
        return rows @ self.table[0].T

    @abstractmethod
    def forward(self, tokens: Tensor, rows: dict[int, Tensor]) -> list[Tensor]:
        """Return the logits [B, S - 1, V] of each draft, taught with the text; draft d of row j is of token j + 2 + d.

        The last d rows of draft d have nothing to learn from.
        """

    @abstractmethod
    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return config.json and the tensors."""


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [B, S, heads, D] as Llama does."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() * ROPE_THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


class Layer(nn.Module):
    """A Llama layer over chains of drafts: pass d of row j sees pass 0 of rows up to j - d, and then its own chain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, NUM_HEADS * HEAD_DIM, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, HEAD_DIM, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, EPS)

    def forward(self, residual: Tensor, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        size, length, _ = x.shape
        positions = torch.arange(length)
        q = rope(self.q_proj(x).view(size, length, NUM_HEADS, HEAD_DIM), positions) / HEAD_DIM**0.5
        k, v = rope(self.k_proj(x)[:, :, None], positions)[:, :, 0], self.v_proj(x)
        past.append((k, v))
        d = len(past) - 1
        mask = torch.full((length, length), float("-inf")).triu(1 - d)
        scores = [torch.einsum("bqhd,bkd->bqhk", q, past[0][0]) + mask[:, None]]
        chain = [(key.roll(d - i, 1), value.roll(d - i, 1)) for i, (key, value) in enumerate(past)][1:]
        scores += [(q * key[:, :, None]).sum(-1, keepdim=True) for key, _ in chain]
        weights = torch.nan_to_num(torch.cat(scores, -1).softmax(-1))
        mixed = torch.einsum("bqhk,bkd->bqhd", weights[..., :length], past[0][1])
        for i, (_, value) in enumerate(chain):
            mixed = mixed + weights[..., length + i, None] * value[:, :, None]
        residual = residual + self.o_proj(mixed.flatten(2))
        normed = self.post_attention_layernorm(residual)
        return residual + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        found = {}
        for name, value in self.state_dict().items():
            part = "self_attn." if name[0] in "qkvo" else "mlp." if name[0] in "gud" else ""
            found[f"{prefix}.{'' if 'norm' in name else part}{name}"] = value
        return found


def layer_config(**more: object) -> dict[str, object]:
    sizes = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "rms_norm_eps": EPS, "rope_theta": ROPE_THETA, "vocab_size": VOCAB, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return sizes | more


class Eagle(Drafter):
    """EAGLE-1: a layer over embedding | hidden row, drafted from with the model's head."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.fc, self.layer = nn.Linear(2 * HIDDEN, HIDDEN), Layer(HIDDEN)
        with torch.no_grad():
            self.fc.weight[:, HIDDEN:] += torch.eye(HIDDEN)

    def forward(self, tokens: Tensor, rows: dict[int, Tensor]) -> list[Tensor]:
        embedded, hidden, past, found = self.embed(tokens[:, 1:]), rows[-1][:, :-1], [], []
        for d in range(self.num_drafts):
            x = self.fc(torch.cat([embedded, hidden], -1))
            x = self.layer(x, x, past)
            found.append(self.model_logits(x).roll(-d, 1))
            hidden = x.roll(1, 1)
        return found

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        parts = {"fc.weight": self.fc.weight, "fc.bias": self.fc.bias} | self.layer.tensors("layers.0")
        return layer_config(architectures=["LlamaForCausalLMEagle"], bias=True), parts


class Eagle3(Drafter):
    """EAGLE-3: a layer over normed embedding | normed rows of several layers, with a vocabulary of its own."""

    def __init__(self, table: Tensor, tokens: Tensor) -> None:
        super().__init__(table)
        self.tokens = tokens
        self.fc, self.layer = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False), Layer(2 * HIDDEN)
        self.hidden_norm, self.input_layernorm, self.norm = (nn.RMSNorm(HIDDEN, EPS) for _ in range(3))
        self.lm_head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(table[tokens])
            self.fc.weight[:, -HIDDEN:] += torch.eye(HIDDEN)

    def forward(self, tokens: Tensor, rows: dict[int, Tensor]) -> list[Tensor]:
        embedded = self.input_layernorm(self.embed(tokens[:, 1:]))
        hidden, past, found = self.fc(torch.cat([rows[tap][:, :-1] for tap in TAPS], -1)), [], []
        for d in range(self.num_drafts):
            x = self.layer(hidden, torch.cat([embedded, self.hidden_norm(hidden)], -1), past)
            found.append(self.lm_head(self.norm(x)).roll(-d, 1))
            hidden = x.roll(1, 1)
        return found

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        norms = ("hidden_norm", "input_layernorm")
        parts = {f"midlayer.{name}.weight": getattr(self, name).weight for name in norms}
        parts |= {f"{name}.weight": getattr(self, name).weight for name in ("fc", "norm", "lm_head")}
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[self.tokens] = True
        parts |= {"d2t": self.tokens - torch.arange(DRAFT_VOCAB), "t2d": known} | self.layer.tensors("midlayer")
        taps = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS], "use_aux_hidden_state": True}
        names = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, "eagle_config": taps}
        return layer_config(**names), parts


class Medusa(Drafter):
    """Medusa: a residual block over the hidden row for each draft, and the model's head."""

    num_drafts = 2

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(self.num_drafts))

    def forward(self, tokens: Tensor, rows: dict[int, Tensor]) -> list[Tensor]:
        hidden = rows[-1][:, :-1]
        return [self.model_logits(hidden + F.silu(block(hidden))) for block in self.blocks]

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        parts = {f"{i}.0.linear.{n}": p for i, block in enumerate(self.blocks) for n, p in block.named_parameters()}
        return {"model_type": "medusa", "medusa_num_heads": self.num_drafts, "medusa_num_layers": 1}, parts


class Hydra(Drafter):
    """Hydra: each head reads the hidden row and the embeddings of all tokens since, and uses the model's head."""

    num_drafts = 2

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        widths = [(i + 2) * HIDDEN for i in range(self.num_drafts)]
        self.linears, self.around = (nn.ModuleList(nn.Linear(w, HIDDEN) for w in widths) for _ in range(2))
        with torch.no_grad():
            for around in self.around:
                around.weight[:, :HIDDEN] += torch.eye(HIDDEN)

    def forward(self, tokens: Tensor, rows: dict[int, Tensor]) -> list[Tensor]:
        state, embedded, found = rows[-1][:, :-1], self.embed(tokens[:, 1:]), []
        for d, (linear, around) in enumerate(zip(self.linears, self.around, strict=True)):
            state = torch.cat([state, embedded.roll(-d, 1)], -1)
            found.append(self.model_logits(around(state) + F.silu(linear(state))))
        return found

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        parts = {}
        for name, linears in (("linear", self.linears), ("res_connection", self.around)):
            for i, linear in enumerate(linears):
                parts |= {f"hydra_mlp.{i}.0.{name}.{n}": p for n, p in linear.named_parameters()}
        config = {"hydra_num_heads": self.num_drafts, "hydra_num_layers": 1, "hydra_head_arch": "mlp"}
        return config | {"grounded_heads": True, "hidden_state_offset": 0}, parts


class MlpSpeculator(Drafter):
    """An MLP speculator: a small recurrent state that takes in token after token."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        u, s, v = torch.linalg.svd(table, full_matrices=False)
        self.emb, self.head = nn.Embedding(VOCAB, INNER_DIM), nn.Linear(INNER_DIM, VOCAB, bias=False)
        self.first = nn.Linear(HIDDEN, INNER_DIM, bias=False)
        self.second = nn.Linear(INNER_DIM, INNER_DIM, bias=False)
        self.ln_weight, self.ln_bias = nn.Parameter(torch.ones(INNER_DIM)), nn.Parameter(torch.zeros(INNER_DIM))
        with torch.no_grad():
            self.emb.weight.copy_(u[:, :INNER_DIM] * VOCAB**0.5)
            self.head.weight.copy_(u[:, :INNER_DIM] * s[:INNER_DIM])
            self.first.weight.copy_(v[:INNER_DIM])
        state_weight = 0.5 ** (0.5 / self.num_drafts)
        self._token_scale = ((1 - state_weight**2) * INNER_DIM / 2) ** 0.5 / state_weight

    def forward(self, tokens: Tensor, rows: dict[int, Tensor]) -> list[Tensor]:
        state, found = F.rms_norm(rows[-1][:, :-1], (HIDDEN,), eps=1e-6) / 2**0.5, []
        embedded = self._token_scale * self.emb(tokens[:, 1:])
        for d in range(self.num_drafts):
            z = (self.second if d else self.first)(state) + embedded.roll(-d, 1)
            state = F.gelu(F.rms_norm(z, (INNER_DIM,), self.ln_weight, 1e-6) + self.ln_bias)
            found.append(self.head(state))
        return found

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        parts = {"emb.0": self.emb, "head.0": self.head, "proj.0": self.first, "proj.1": self.second}
        tensors = {f"speculator.{name}.weight": part.weight for name, part in parts.items()}
        tensors |= {"speculator.ln.0.weight": self.ln_weight, "speculator.ln.0.bias": self.ln_bias}
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": HIDDEN,
            "inner_dim": INNER_DIM, "vocab_size": VOCAB, "n_predict": self.num_drafts, "tie_weights": True,
            "scale_input": True,
        }  # fmt: skip
        return config, tensors


class DraftModel(Drafter):
    """A Llama of two narrow layers, whose embedding begins as the model's in fewer dimensions."""

    num_drafts = 1

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=DRAFT_HIDDEN, intermediate_size=2 * DRAFT_HIDDEN, num_hidden_layers=2,
            num_attention_heads=DRAFT_HIDDEN // HEAD_DIM, num_key_value_heads=1, head_dim=HEAD_DIM,
            max_position_embeddings=4096, tie_word_embeddings=True, rms_norm_eps=EPS, bos_token_id=0, eos_token_id=2,
            pad_token_id=3,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(self.config)
        u, s, _ = torch.linalg.svd(table, full_matrices=False)
        with torch.no_grad():
            self.llama.model.embed_tokens.weight.copy_(u[:, :DRAFT_HIDDEN] * s[:DRAFT_HIDDEN])

    def forward(self, tokens: Tensor, rows: dict[int, Tensor]) -> list[Tensor]:
        return [self.llama(tokens).logits[:, 1:]]

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        config = self.config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        return config, {n: p for n, p in self.llama.state_dict().items() if n != "lm_head.weight"}
