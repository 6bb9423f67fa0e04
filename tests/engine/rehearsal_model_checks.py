"""Checks of the rehearsal model that need torch: run by test_trained_model.py, in the engine's environment.

usage: python rehearsal_model_checks.py CHECK
"""

import hashlib
import sys
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from rehearsal_model.chat import END, ROLE_TOKENS, render
from rehearsal_model.export import export
from rehearsal_model.model import Draft, Shape, Target, rotate
from rehearsal_model.text import conversations
from rehearsal_model.tokenizer import train_tokenizer
from rehearsal_model.train import Plan, encode, prepare_torch, train_draft, train_target

SHAPE = Shape()


def random_pair() -> tuple[Target, Draft]:
    torch.manual_seed(3)
    target = Target(SHAPE).requires_grad_(False)
    return target, Draft(target).requires_grad_(False)


def tokenizer():
    return train_tokenizer(map(render, islice(conversations(0), 200)), SHAPE.vocabulary)


def weights_after_training(plan: Plan) -> str:
    prepare_torch()
    corpus = list(islice(conversations(plan.seed), 200))
    stream = encode(tokenizer(), corpus)
    target = train_target(SHAPE, plan, stream, lambda line: None)
    draft = train_draft(target, plan, stream, lambda line: None)
    digest = hashlib.sha256()
    for weight in (*target.parameters(), *draft.parameters()):
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def training_repeats() -> None:
    """The same seed gives the same weights, another seed others."""
    plan = Plan(window=64, target_steps=4, draft_steps=4)
    assert weights_after_training(plan) == weights_after_training(plan)
    assert weights_after_training(plan) != weights_after_training(replace(plan, seed=1))


def target_is_a_llama() -> None:
    """The exported target gives the same logits in transformers' own Llama."""
    from transformers import AutoModelForCausalLM

    target, draft = random_pair()
    tokens = torch.randint(SHAPE.vocabulary, (2, 50))
    with tempfile.TemporaryDirectory() as directory:
        export(SHAPE, target, draft, tokenizer(), Path(directory))
        reference = AutoModelForCausalLM.from_pretrained(f"{directory}/target", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(target(tokens)[0], reference(tokens).logits, atol=1e-4, rtol=1e-4)


def generation_uses_its_cache_rightly() -> None:
    """Greedy generation with cached keys chooses what the whole text's logits choose."""
    target, _ = random_pair()
    tokens = torch.randint(1, SHAPE.vocabulary, (3, 10))
    text = target.generate(tokens, 40, end=SHAPE.vocabulary)
    chosen = target(text[:, :-1])[0].argmax(-1)
    assert torch.equal(text[:, :10], tokens)
    assert torch.equal(text[:, 10:], chosen[:, 9:])


def unrolling_is_drafting() -> None:
    """Each unrolled step equals a draft made token by token, as a server makes it, from the same prefix."""
    _, draft = random_pair()
    length, steps = 12, 4
    embeddings, captured = torch.randn(1, length, SHAPE.hidden), torch.randn(1, length, 3 * SHAPE.hidden)
    unrolled = list(draft.unroll(embeddings, captured, steps))
    layer, attention = draft.midlayer, draft.midlayer.self_attn

    def attend(q, keys, values):
        groups = SHAPE.heads // SHAPE.key_value_heads
        keys, values = (torch.cat(x, 2).repeat_interleave(groups, 1) for x in (keys, values))
        return torch.softmax(q @ keys.transpose(-1, -2) / SHAPE.head**0.5, -1) @ values

    for last_known in range(length - steps):
        keys, values = [], []
        state = None
        for position in range(last_known + steps):
            drafting = position - last_known
            hidden = draft.fc(captured[:, position : position + 1]) if drafting <= 0 else state
            embedded = layer.input_layernorm(embeddings[:, position : position + 1])
            q, k, v = attention.project(torch.cat([embedded, layer.hidden_norm(hidden)], -1), position)
            keys.append(k)
            values.append(v)
            state = layer.finish(hidden, attend(q, keys, values))
            if drafting >= 0:
                logits = draft.lm_head(draft.norm(state))
                torch.testing.assert_close(unrolled[drafting][:, position], logits[:, 0], atol=1e-4, rtol=1e-4)


def rotation_depends_on_distance_only() -> None:
    q, k = torch.randn(1, 1, 1, SHAPE.head), torch.randn(1, 1, 1, SHAPE.head)

    def score(at_q, at_k):
        return (rotate(q, at_q, SHAPE.rope_theta) * rotate(k, at_k, SHAPE.rope_theta)).sum()

    torch.testing.assert_close(score(9, 4), score(109, 104), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(score(9, 4), score(9, 5), atol=1e-3)


def tokenizer_reads_and_writes_everything() -> None:
    """Transformers' tokenizer, offline: every byte of UTF-8 survives, and the template gives the trained tokens."""
    from transformers import AutoTokenizer

    target, draft = random_pair()
    trained = tokenizer()
    with tempfile.TemporaryDirectory() as directory:
        export(SHAPE, target, draft, trained, Path(directory))
        loaded = [AutoTokenizer.from_pretrained(f"{directory}/{name}") for name in ("target", "draft")]
    assert trained.get_vocab_size() == SHAPE.vocabulary
    assert loaded[0].get_vocab() == loaded[1].get_vocab()
    text = 'Grüße,\tΔ 漢字 🙂\r\n{"a": [1.5e-3, null]} ' + "".join(map(chr, range(32, 256)))
    assert loaded[0].decode(loaded[0].encode(text)) == text
    messages = next(conversations(9))
    asked = messages[:-1]
    wanted = trained.encode(render(asked) + ROLE_TOKENS["assistant"]).ids
    given = loaded[0].apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert loaded[0].encode(given) == wanted
    assert loaded[0].eos_token_id == trained.token_to_id(END) == 0


CHECKS = {
    check.__name__: check
    for check in (
        training_repeats,
        target_is_a_llama,
        generation_uses_its_cache_rightly,
        unrolling_is_drafting,
        rotation_depends_on_distance_only,
        tokenizer_reads_and_writes_everything,
    )
}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
