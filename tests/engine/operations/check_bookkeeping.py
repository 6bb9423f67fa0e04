"""KV slots and positions, against references that go token by token."""

import random

import pytest
import torch
from sglang_cpu_engine import bookkeeping

POOL_LEN = 64


@pytest.fixture(params=range(40))
def rng(request):
    return random.Random(request.param)


@pytest.fixture
def pool(rng):
    """(slots of each request's tokens, rows of the batch's requests): distinct numbers, so that a mix-up shows."""
    slots = torch.randperm(10 * POOL_LEN, generator=torch.Generator().manual_seed(rng.randrange(1000)))
    return slots.view(10, POOL_LEN).int(), torch.tensor(rng.sample(range(10), rng.randint(1, 6)))


def lengths(rng, count, low, high):
    return torch.tensor([rng.randint(low, high) for _ in range(count)])


def test_assign_and_read_back(rng, pool):
    req_to_token, rows = pool
    start = lengths(rng, len(rows), 0, 40)
    end = start + lengths(rng, len(rows), 0, 20)
    new = torch.arange(1000, 1000 + int((end - start).sum()) + 3)  # a few more than needed
    expected, position = req_to_token.clone(), 0
    for row, first, last in zip(rows, start, end, strict=True):
        for token in range(first, last):
            expected[row, token] = new[position]
            position += 1
    bookkeeping.assign_req_to_token_pool(rows, req_to_token, start, end, new, POOL_LEN, 8)
    assert req_to_token.equal(expected)
    found = bookkeeping.assign_extend_cache_locs_func(rows, req_to_token, start, end, len(rows), None, "cpu")
    assert found.tolist() == new[:position].tolist()


def test_draft_slots(rng, pool):
    req_to_token, rows = pool
    topk, steps = rng.randint(1, 4), rng.randint(1, 5)
    seq_lens = lengths(rng, len(rows), 1, POOL_LEN - 1)  # some branches do not fit any more
    new = torch.arange(1000, 1000 + len(rows) * topk * steps)
    expected = req_to_token.clone()
    for i, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
        for j in range(topk * steps):
            if seq_len + j < POOL_LEN:
                expected[row, seq_len + j] = new[i * topk * steps + j]
    bookkeeping.assign_draft_cache_locs(
        rows, req_to_token, seq_lens, None, None, new, None, None, None, 0, POOL_LEN, topk, steps, 1, 8, 8
    )
    assert req_to_token.equal(expected)
    found = torch.empty_like(new)
    bookkeeping.assign_draft_cache_locs_page_size_1(rows, req_to_token, seq_lens, found, POOL_LEN, topk, steps)
    for i, seq_len in enumerate(seq_lens):
        for j in range(topk * steps):
            number = i * topk * steps + j
            assert found[number] == (new[number] if seq_len + j < POOL_LEN else 0)


def test_top_k_with_pages_is_refused():
    with pytest.raises(NotImplementedError, match="top-k 2 with pages of 16 tokens"):
        bookkeeping.assign_draft_cache_locs(*[None] * 9, 0, POOL_LEN, 2, 3, 16)


def test_positions_and_bonus_tokens(rng):
    count = rng.randint(1, 6)
    accepted = lengths(rng, count, 1, 5).int()
    seq_lens = lengths(rng, count, 10, 50)
    tokens = torch.arange(100, 100 + int(accepted.sum()))
    positions, bonus = torch.empty_like(tokens), torch.empty(count, dtype=torch.int32)
    bookkeeping.create_extend_after_decode_spec_info(tokens, seq_lens, accepted, positions, bonus, 8)
    expected = [int(s) - int(a) + i for s, a in zip(seq_lens, accepted, strict=True) for i in range(a)]
    assert positions.tolist() == expected
    assert bonus.tolist() == [99 + int(accepted[: i + 1].sum()) for i in range(count)]

    rows = torch.randint(0, 50, (count, 5))
    bookkeeping.fill_bonus_tokens(rows, accepted, bonus, 5)
    assert bonus.tolist() == [int(rows[i, accepted[i] - 1]) for i in range(count)]


def test_pages_that_stay(rng):
    """Of a chain of slots behind the tokens, those on the page of the last kept one must not be freed."""
    count, page, drafted = rng.randint(1, 6), rng.choice([2, 4, 8]), rng.randint(1, 9)
    seq_lens = lengths(rng, count, 1, 30)
    kept = lengths(rng, count, 1, drafted)
    evict = torch.tensor([[i >= int(k) for i in range(drafted)] for k in kept]).flatten()
    bookkeeping.align_evict_mask_to_page_size(seq_lens, evict, page, drafted, 16)
    for row, seq_len, k in zip(evict.view(count, drafted), seq_lens, kept, strict=True):
        last_page = (int(seq_len) + int(k) - 1) // page
        assert row.tolist() == [i >= int(k) and (int(seq_len) + i) // page != last_page for i in range(drafted)]


@pytest.mark.parametrize("decode", [False, True])
def test_paged_allocation(rng, decode):
    count, page = rng.randint(1, 6), rng.choice([1, 2, 4, 16])
    prefix = lengths(rng, count, 0, 40)
    extend = torch.ones_like(prefix) if decode else lengths(rng, count, 0, 40)
    free = torch.tensor(rng.sample(range(100, 500), 300))
    # A request's tokens lie in the order of its pages; the last token's page is page 10 + request.
    last = torch.tensor([(10 + i) * page + (int(p) - 1) % page if p else -1 for i, p in enumerate(prefix)])
    expected, unused = [], free.tolist()
    for i in range(count):
        slot = int(last[i])
        for position in range(int(prefix[i]), int(prefix[i] + extend[i])):
            slot = unused.pop(0) * page if position % page == 0 else slot + 1
            expected.append(slot)
    out = torch.empty(len(expected), dtype=torch.long)
    if decode:
        bookkeeping.alloc_decode_kernel(prefix + 1, last, free, out, 8, page)
    else:
        bookkeeping.alloc_extend_kernel(prefix, prefix + extend, last, free, out, 8, page)
    assert out.tolist() == expected


def test_too_few_pages_leave_the_answer_to_the_caller():
    out = torch.full((8,), -1)
    bookkeeping.alloc_extend_kernel(
        torch.tensor([0]), torch.tensor([8]), torch.tensor([-1]), torch.tensor([5]), out, 1, 4
    )
    assert out.tolist() == [-1] * 8
