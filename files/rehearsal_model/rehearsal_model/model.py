"""A small Llama and the EAGLE-3 head that drafts for it, written so that SGLang computes the same from their weights.

EAGLE-3 (Li et al., 2025, arXiv:2503.01840) drafts with one decoder layer. It does not read the text alone: at position
p it sees hidden states of the target at p (from a low, a middle and a high layer, joined by `fc`) and the embedding of
the token that the target has just chosen for p+1, and predicts the token at p+2. To draft further there are no hidden
states of the target yet, so it reads its own output in their place. What it does then must be trained as well: see
`Draft.unroll`.

Shapes: B sequences, T positions, H the hidden size, V the vocabulary size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of target and draft. Heads and sizes are even, so that two tensor-parallel ranks can share them."""

    vocabulary: int = 512
    hidden: int = 128
    layers: int = 8
    heads: int = 4
    key_value_heads: int = 2
    head: int = 32
    intermediate: int = 256
    context: int = 4096
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    @property
    def captured(self) -> tuple[int, int, int]:
        """The layers whose *inputs* the draft sees: SGLang's choice for a Llama whose configuration names none.

        They must be three different layers, which takes at least eight.
        """
        return 2, self.layers // 2, self.layers - 3


class Cache:
    """Keys and values, (layers, B, key-value heads, length, head) each, of which the first `filled` are written."""

    def __init__(self, shape: Shape, sequences: int, length: int) -> None:
        self.keys = torch.empty(shape.layers, sequences, shape.key_value_heads, length, shape.head)
        self.values = torch.empty_like(self.keys)
        self.filled = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of new tokens and returns all of the layer's; the caller moves `filled` after the last layer."""
        end = self.filled + keys.shape[2]
        self.keys[layer, :, :, self.filled : end] = keys
        self.values[layer, :, :, self.filled : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


def _linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


def rotate(x: Tensor, first: int, theta: float) -> Tensor:
    """Rotary position embedding, halves layout, of x (B, heads, T, head) at positions first, first + 1, ..."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half) / half)
    angle = torch.outer(torch.arange(first, first + x.shape[-2]), frequency)
    cos, sin = angle.cos(), angle.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, inputs: int, gain: float) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = _linear(inputs, shape.heads * shape.head)
        self.k_proj = _linear(inputs, shape.key_value_heads * shape.head)
        self.v_proj = _linear(inputs, shape.key_value_heads * shape.head)
        self.o_proj = _linear(shape.heads * shape.head, shape.hidden, gain)

    def project(self, x: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (B, T, inputs), each (B, heads, T, head); first is the position of x[:, 0]."""
        shape = self.shape
        q, k, v = (
            projection(x).unflatten(-1, (-1, shape.head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, first, shape.rope_theta), rotate(k, first, shape.rope_theta), v

    def output(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape, gain: float) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden, shape.intermediate)
        self.up_proj = _linear(shape.hidden, shape.intermediate)
        self.down_proj = _linear(shape.intermediate, shape.hidden, gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama decoder layer. The draft's reads an embedding beside the hidden state, hence twice the inputs."""

    def __init__(self, shape: Shape, *, reads_embedding: bool = False) -> None:
        super().__init__()
        gain = 1 / math.sqrt(2 * shape.layers)  # keeps the sum over all layers at unit size
        self.self_attn = Attention(shape, shape.hidden * (2 if reads_embedding else 1), gain)
        self.mlp = Mlp(shape, gain)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        if reads_embedding:
            self.hidden_norm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer after attention, (B, T, H)."""
        x = x + self.self_attn.output(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        self.lm_head = _linear(shape.hidden, shape.vocabulary)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V) and captured hidden states (B, T, 3 H) of tokens (B, T).

        A cache holds keys and values of all earlier tokens and is extended; more than one token needs an empty one.
        """
        x = self.embed_tokens(tokens)
        first = cache.filled if cache else 0
        captured = []
        for index, layer in enumerate(self.layers):
            if index in self.shape.captured:
                captured.append(x)
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), first)
            if cache:
                k, v = cache.extend(index, k, v)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=first == 0, enable_gqa=True)
            x = layer.finish(x, attended)
        if cache:
            cache.filled += tokens.shape[1]
        return self.lm_head(self.norm(x)), torch.cat(captured, -1)

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int, end: int) -> Tensor:
        """Tokens (B, T) continued greedily to (B, length) at most; what follows an end token is meaningless."""
        cache = Cache(self.shape, len(tokens), length)
        logits, _ = self(tokens, cache)
        ended = torch.zeros(len(tokens), dtype=torch.bool)
        while True:
            chosen = logits[:, -1].argmax(-1)
            tokens = torch.cat([tokens, chosen[:, None]], 1)
            ended |= chosen == end
            if tokens.shape[1] >= length or ended.all():
                return tokens
            logits, _ = self(chosen[:, None], cache)


class Draft(nn.Module):
    def __init__(self, target: Target) -> None:
        super().__init__()
        shape = target.shape
        self.fc = _linear(3 * shape.hidden, shape.hidden)
        self.midlayer = Layer(shape, reads_embedding=True)
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        self.lm_head = _linear(shape.hidden, shape.vocabulary)
        # The output layer starts as the target's: the draft then only has to learn to arrive at similar hidden states.
        self.norm.load_state_dict(target.norm.state_dict())
        self.lm_head.load_state_dict(target.lm_head.state_dict())

    def unroll(self, embeddings: Tensor, captured: Tensor, steps: int) -> Iterator[Tensor]:
        """Logits (B, T, V) of each drafting step, where logits[:, p] predict token p+2.

        embeddings[:, p] (B, T, H) is that of token p+1 and captured[:, p] (B, T, 3 H) the target's state at p.

        Step 0 is what the draft does where the target's state is known. At step s it is known up to p-s only: its own
        output of step s-1 at p-1 stands in for it, and so on down to step 0 at p-s. All positions are computed at
        once, each as if drafting had begun s positions before it ("training-time test" in the paper): a query of step
        s attends to keys of step 0 up to p-s, then to one key of each step j = 1..s, the one at p-s+j. The first s
        positions of step s have no such past and are to be left out of the loss.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        length, width = embeddings.shape[1], attention.shape.head
        groups = attention.shape.heads // attention.shape.key_value_heads
        embedded = layer.input_layernorm(embeddings)
        state = self.fc(captured)
        position = torch.arange(length)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            q, k, v = attention.project(torch.cat([embedded, layer.hidden_norm(state)], -1))
            keys.append(k.repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            q = q / math.sqrt(width)
            seen = position[None, :] <= position[:, None] - step
            scores = (q @ keys[0].transpose(-1, -2)).masked_fill(~seen, -1e9)
            own = [(q * _shift(keys[j], step - j)).sum(-1, keepdim=True) for j in range(1, step + 1)]
            weights = torch.cat([scores, *own], -1).softmax(-1)
            attended = weights[..., :length] @ values[0]
            for j in range(1, step + 1):
                attended = attended + weights[..., length + j - 1, None] * _shift(values[j], step - j)
            state = layer.finish(state, attended)
            yield self.lm_head(self.norm(state))
            state = _shift(state, 1)


def _shift(x: Tensor, positions: int) -> Tensor:
    """x (..., T, n) moved later by some positions: the result at p is x at p - positions, or zero."""
    return F.pad(x, (0, 0, positions, 0))[..., : x.shape[-2], :]
