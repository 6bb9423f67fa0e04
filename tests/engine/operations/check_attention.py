"""The attention backend, against softmax over an explicit list of the KV slots that each query sees."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_cpu_engine.attention import TorchMultiStepDraft, TorchTreeAttention

HEADS, KV_HEADS, SIZE, CONTEXT, SLOTS = 4, 2, 8, 64, 1000
LAYER = SimpleNamespace(
    tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=SIZE, layer_id=0, scaling=1 / math.sqrt(SIZE)
)


class Pool:
    def __init__(self):
        self.keys, self.values = torch.randn(2, SLOTS, KV_HEADS, SIZE)

    def set_kv_buffer(self, _layer, slots, keys, values):
        self.keys[slots], self.values[slots] = keys.view(-1, KV_HEADS, SIZE), values.view(-1, KV_HEADS, SIZE)

    def get_kv_buffer(self, _layer_id):
        return self.keys, self.values


class Case:
    """A model runner's pools, and a batch of requests of random lengths."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.count = self.rng.randint(1, 5)
        self.rows = torch.tensor(self.rng.sample(range(10), self.count))
        self.table = (1 + torch.randperm(SLOTS - 1)[: 10 * CONTEXT]).view(10, CONTEXT).int()
        self.pool = Pool()
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool
        )

    def lengths(self, low, high):
        return torch.tensor([self.rng.randint(low, high) for _ in range(self.count)])

    def batch(self, mode, seq_lens, **fields):
        return SimpleNamespace(forward_mode=mode, seq_lens=seq_lens, req_pool_indices=self.rows, **fields)

    def check(self, backend, batch, written, seen):
        """`written[q]` and `seen[q]`: (request, token) of the KV row that query q writes, and of those that it sees."""

        def slot(place):
            return int(self.table[self.rows[place[0]], place[1]])

        queries = torch.randn(len(seen), HEADS * SIZE)
        keys, values = torch.randn(2, len(seen), KV_HEADS * SIZE)
        batch.out_cache_loc = torch.tensor([slot(place) for place in written])
        run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
        out = run(queries, keys, values, LAYER, batch)
        for query, places in enumerate(seen):
            slots = [slot(place) for place in places]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                part = slice(head * SIZE, (head + 1) * SIZE)
                weights = torch.softmax(self.pool.keys[slots, kv_head] @ queries[query, part] * LAYER.scaling, 0)
                torch.testing.assert_close(out[query, part], weights @ self.pool.values[slots, kv_head])


@pytest.fixture(params=range(10))
def case(request):
    return Case(request.param)


def test_decode(case):
    seq_lens = case.lengths(1, 40)
    batch = case.batch(ForwardMode.DECODE, seq_lens)
    backend = TorchTreeAttention(case.runner)
    backend.init_forward_metadata(batch)
    written = [(i, int(length) - 1) for i, length in enumerate(seq_lens)]
    case.check(backend, batch, written, [[(i, t) for t in range(length)] for i, length in enumerate(seq_lens)])


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2])
def test_extend(case, mode):
    prefix = case.lengths(0, 20)
    extend = torch.full_like(prefix, 4) if mode.is_draft_extend_v2() else case.lengths(1, 20)
    batch = case.batch(mode, prefix + extend, extend_seq_lens=extend.int())
    backend = TorchTreeAttention(case.runner)
    backend.init_forward_metadata(batch)
    written = [(i, int(prefix[i]) + j) for i in range(case.count) for j in range(extend[i])]
    case.check(backend, batch, written, [[(i, t) for t in range(token + 1)] for i, token in written])


def test_target_verify(case):
    seq_lens, n = case.lengths(1, 30), case.rng.randint(1, 9)
    trees = torch.rand(case.count, n, n) < 0.5
    trees |= torch.eye(n, dtype=torch.bool)
    parts = [torch.cat([torch.ones(n, int(s), dtype=torch.bool), t], 1) for s, t in zip(seq_lens, trees, strict=True)]
    mask = torch.cat([part.flatten() for part in parts])
    batch = case.batch(
        ForwardMode.TARGET_VERIFY, seq_lens, spec_info=SimpleNamespace(draft_token_num=n, custom_mask=mask)
    )
    backend = TorchTreeAttention(case.runner)
    backend.init_forward_metadata(batch)
    written = [(i, int(seq_lens[i]) + j) for i in range(case.count) for j in range(n)]
    seen = []
    for i in range(case.count):
        for j in range(n):
            tokens = [*range(seq_lens[i]), *(int(seq_lens[i]) + k for k in range(n) if trees[i, j, k])]
            seen.append([(i, token) for token in tokens])
    case.check(backend, batch, written, seen)


def test_draft_steps(case):
    seq_lens, topk, steps = case.lengths(1, 30), case.rng.randint(1, 4), case.rng.randint(2, 5)
    batch = case.batch(ForwardMode.DECODE, seq_lens)
    backend = TorchMultiStepDraft(case.runner, topk, steps)
    backend.init_forward_metadata(batch)
    assert len(backend.attn_backends) == steps - 1
    for step, one in enumerate(backend.attn_backends):
        starts = [(i, int(seq_lens[i]) + branch * steps) for i in range(case.count) for branch in range(topk)]
        written = [(i, start + step) for i, start in starts]
        seen = [[(i, token) for token in [*range(seq_lens[i]), *range(start, start + step + 1)]] for i, start in starts]
        case.check(one, batch, written, seen)


def test_a_one_step_draft_decodes_nothing(case):
    assert TorchMultiStepDraft(case.runner, 4, 1).attn_backends == []


def test_idle(case):
    TorchTreeAttention(case.runner).init_forward_metadata(case.batch(ForwardMode.IDLE, torch.empty(0)))
