"""Trains the target on the text, then the draft on what the target itself writes."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .chat import END, ROLE_TOKENS, Message, render
from .model import Draft, Layer, Shape, Target
from .text import conversations
from .tokenizer import train_tokenizer

THREADS = 2  # fixed: sums are split over threads, so another number of threads gives (slightly) other weights


@dataclass(frozen=True)
class Plan:
    """How long and on how much to train."""

    seed: int = 0
    conversations: int = 5000
    window: int = 384  # tokens of one training sequence
    batch: int = 2
    target_steps: int = 800
    target_rate: float = 1e-2
    answers: int = 384  # greedy answers of the target that the draft learns from
    draft_steps: int = 300
    draft_rate: float = 1e-2
    unrolled: int = 5  # drafting steps trained; at least as many as will be drafted


@dataclass(frozen=True)
class Stream:
    """Conversations laid end to end. Both (N,); the weight of a token is its share in the loss."""

    tokens: Tensor
    weights: Tensor

    def windows(self, number: int, length: int, generator: torch.Generator) -> "Stream":
        """Random pieces, both (number, length).

        A piece may begin and end within a conversation and hold several: so the model sees long contexts, although
        conversations are short.
        """
        starts = torch.randint(len(self.tokens) - length + 1, (number, 1), generator=generator)
        index = starts + torch.arange(length)
        return Stream(self.tokens[index], self.weights[index])


LONGEST_ANSWER = 220  # tokens; the text's own answers are shorter

ANSWER_WEIGHT, OTHER_WEIGHT = 1.0, 0.1  # requests are mostly noise: a little is worth learning from them, not much


def encode(tokenizer: Tokenizer, texts: Iterable[list[Message]]) -> Stream:
    tokens: list[int] = []
    weights: list[float] = []
    for messages in texts:
        for message in messages:
            answered = message["role"] == "assistant"
            ids = tokenizer.encode(render([message])).ids
            tokens += ids
            # The role token is not part of what the model has to say: the server writes it.
            weights += [OTHER_WEIGHT] + [ANSWER_WEIGHT if answered else OTHER_WEIGHT] * (len(ids) - 1)
    return Stream(torch.tensor(tokens), torch.tensor(weights))


class Progress:
    """Prints a line for people every few seconds, with the time left."""

    def __init__(self, name: str, steps: int, show: Callable[[str], None]) -> None:
        self.name, self.steps, self.show = name, steps, show
        self.start = self.shown = time.monotonic()

    def update(self, done: int, loss: float) -> None:
        now = time.monotonic()
        if now - self.shown >= 5 or done == self.steps:
            self.shown = now
            left = (now - self.start) / done * (self.steps - done)
            self.show(f"{self.name}: step {done} of {self.steps}, loss {loss:.3f}, about {left:.0f} s left")


class Optimizer:
    """Muon for the matrices of decoder layers, AdamW for all else; short warm-up, linear decay, clipped gradients.

    Muon (Jordan et al., 2024) makes a matrix's update orthogonal. With it the target needs half the steps.
    """

    def __init__(self, module: nn.Module, rate: float, steps: int) -> None:
        self.parameters = list(module.parameters())
        inner = {
            parameter
            for layer in module.modules()
            if isinstance(layer, Layer)
            for parameter in layer.parameters()
            if parameter.ndim == 2
        }
        matrices = [parameter for parameter in self.parameters if parameter in inner]  # a set has no fixed order
        others = [parameter for parameter in self.parameters if parameter not in inner]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate / 3, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
        )
        self.schedules = [
            LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / steps)) for optimizer in self.optimizers
        ]

    def step(self, loss: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()


def target_loss(target: Target, piece: Stream) -> Tensor:
    """Mean cross-entropy in nats a token, weighted, of the next token of piece (B, T)."""
    logits, _ = target(piece.tokens[:, :-1])
    losses = F.cross_entropy(logits.transpose(1, 2), piece.tokens[:, 1:], reduction="none")
    weights = piece.weights[:, 1:]
    return (losses * weights).sum() / weights.sum()


def train_target(shape: Shape, plan: Plan, stream: Stream, show: Callable[[str], None]) -> Target:
    torch.manual_seed(plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    target = Target(shape)
    optimizer = Optimizer(target, plan.target_rate, plan.target_steps)
    progress = Progress("target", plan.target_steps, show)
    for step in range(1, plan.target_steps + 1):
        loss = target_loss(target, stream.windows(plan.batch, plan.window, generator))
        optimizer.step(loss)
        progress.update(step, loss.item())
    return target.requires_grad_(False)


def answers(target: Target, tokenizer: Tokenizer, number: int, seed: int) -> list[list[Message]]:
    """Requests that the target was not trained on, with its own greedy answers; those that did not end are left out.

    64 requests of about equal length are answered together, each cut at its beginning to the length of the shortest,
    so that no padding is needed.
    """
    end = tokenizer.token_to_id(END)
    asked = [messages[:-1] for messages in islice(conversations(seed), number)]
    prompts = [tokenizer.encode(render(messages) + ROLE_TOKENS["assistant"]).ids for messages in asked]
    by_length = sorted(range(number), key=lambda index: len(prompts[index]))
    answered: list[list[Message]] = []
    for together in (by_length[first : first + 64] for first in range(0, number, 64)):
        length = len(prompts[together[0]])
        cut = torch.tensor([prompts[index][-length:] for index in together])
        written = target.generate(cut, length + LONGEST_ANSWER, end)[:, length:].tolist()
        for index, ids in zip(together, written, strict=True):
            if end in ids:
                content = tokenizer.decode(ids[: ids.index(end)], skip_special_tokens=False)
                answered.append([*asked[index], {"role": "assistant", "content": content}])
    random.Random(seed).shuffle(answered)
    return answered


def draft_losses(target: Target, draft: Draft, piece: Stream, steps: int) -> list[Tensor]:
    """For each drafting step the weighted cross-entropy, in nats a token, of draft against target distribution.

    Learning the whole distribution rather than the token chosen gives the tree of candidates its second and third best.
    """
    with torch.no_grad():
        logits, captured = target(piece.tokens[:, :-1])
        # Position p of the draft is about token p+2, of which the target's logits at p+1 speak.
        wanted, captured = logits[:, 1:].softmax(-1), captured[:, :-1]
        embeddings = target.embed_tokens(piece.tokens[:, 1:-1])
        weights = piece.weights[:, 2:]
    losses = []
    for step, drafted in enumerate(draft.unroll(embeddings, captured, steps)):
        losses_here = -(wanted[:, step:] * drafted[:, step:].log_softmax(-1)).sum(-1)
        losses.append((losses_here * weights[:, step:]).sum() / weights[:, step:].sum())
    return losses


def train_draft(target: Target, plan: Plan, stream: Stream, show: Callable[[str], None]) -> Draft:
    torch.manual_seed(plan.seed + 1)
    generator = torch.Generator().manual_seed(plan.seed + 1)
    draft = Draft(target)
    optimizer = Optimizer(draft, plan.draft_rate, plan.draft_steps)
    progress = Progress("draft", plan.draft_steps, show)
    for step in range(1, plan.draft_steps + 1):
        losses = draft_losses(target, draft, stream.windows(plan.batch, plan.window, generator), plan.unrolled)
        # Later steps count less: they are reached only when the earlier ones were accepted.
        optimizer.step(torch.stack([0.8**depth * loss for depth, loss in enumerate(losses)]).sum())
        progress.update(step, losses[0].item())
    return draft.requires_grad_(False)


@torch.no_grad()
def held_out(target: Target, draft: Draft, plan: Plan, written: Stream, corpus: Stream) -> dict[str, object]:
    """Figures on text that neither was trained on.

    top1[s]: how often step s of the draft puts first what the target puts first, over the target's own answers.
    """
    generator = torch.Generator().manual_seed(plan.seed + 2)
    loss = target_loss(target, corpus.windows(32, plan.window, generator)).item()
    piece = written.windows(16, plan.window, generator)
    logits, captured = target(piece.tokens[:, :-1])
    chosen = logits[:, 1:].argmax(-1)
    answered = piece.weights[:, 2:] == ANSWER_WEIGHT
    embeddings = target.embed_tokens(piece.tokens[:, 1:-1])
    top1, top4 = [], []
    for step, drafted in enumerate(draft.unroll(embeddings, captured[:, :-1], plan.unrolled)):
        hits = drafted.topk(4).indices == chosen[..., None]
        counted = hits[:, step:][answered[:, step:]].float()
        top1.append(round(counted[:, 0].mean().item(), 3))
        top4.append(round(counted.sum(-1).mean().item(), 3))
    return {"target_loss_nats_per_token": round(loss, 4), "draft_top1": top1, "draft_top4": top4}


def prepare_torch() -> None:
    """Fixes, for the whole process, what would make equal seeds give unequal weights."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)


def train(shape: Shape, plan: Plan, show: Callable[[str], None]) -> tuple[Tokenizer, Target, Draft, dict[str, object]]:
    """Tokenizer, trained pair, and figures on held-out text."""
    prepare_torch()
    corpus = list(islice(conversations(plan.seed), plan.conversations))
    tokenizer = train_tokenizer(map(render, corpus), shape.vocabulary)
    target = train_target(shape, plan, encode(tokenizer, corpus), show)
    show("target: answers requests, for the draft to learn from")
    learned = answers(target, tokenizer, plan.answers, plan.seed + 1)
    unseen = answers(target, tokenizer, plan.answers // 4, plan.seed + 2)
    draft = train_draft(target, plan, encode(tokenizer, learned), show)
    figures = held_out(
        target, draft, plan, encode(tokenizer, unseen), encode(tokenizer, islice(conversations(plan.seed + 3), 500))
    )
    return tokenizer, target, draft, figures | {"answers_ended": round(len(learned) / plan.answers, 3)}
