"""KV slots and positions: what SGLang computes in small Triton kernels, in torch.

Each function has the parameters of the kernel whose name it bears, up to the sizes of blocks at the end.
``req_to_token`` is ``(request slots, context)``: the KV slot of each token of each request.
"""
# ruff: noqa: PLR0917 (the signatures are SGLang's)

import torch


def _ranges(start: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The numbers ``start``, ``start + 1``, ... of each row in turn: ``(sum of lengths,)``."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + (start - ends + lengths).repeat_interleave(lengths)


def assign_req_to_token_pool(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, _pool_len, *_block_sizes
) -> None:  # fmt: skip
    """Write the slots ``out_cache_loc``, request after request, at the tokens from start to end of each request."""
    lengths = (end_offset - start_offset).long()
    rows = req_pool_indices.repeat_interleave(lengths)
    req_to_token[rows, _ranges(start_offset, lengths)] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_extend_cache_locs_func(
    req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device
) -> torch.Tensor:  # fmt: skip
    """Read what :func:`assign_req_to_token_pool` writes: ``(batch_size * draft_token_num,)`` slots."""
    lengths = (end_offset - start_offset).long()
    return req_to_token[req_pool_indices.repeat_interleave(lengths), _ranges(start_offset, lengths)].long()


def _branch_slots(req_pool_indices, seq_lens, count: int, pool_len: int):
    """Where ``count`` slots behind each request's tokens are kept, and which of them lie inside the pool.

    Near the end of the context the draft's slots do not all fit; the draft then guesses worse, the target is not
    concerned.
    """
    columns = seq_lens[:, None] + torch.arange(count)
    return req_pool_indices[:, None].expand_as(columns), columns, columns < pool_len


def assign_draft_cache_locs(
    req_pool_indices, req_to_token, seq_lens, _extend_lens, _num_new_pages_per_topk, out_cache_loc, _source_cache_loc,
    _target_cache_loc, _last_page_lens_cumsum, _duplicate_cache_len, pool_len, topk, speculative_num_steps, page_size,
    *_block_sizes,
) -> None:  # fmt: skip
    """Write the draft's slots, ``topk`` branches of ``speculative_num_steps`` each, behind the tokens of each request.

    :raises NotImplementedError: for top-k above 1 with pages of several tokens, which SGLang refuses off GPUs as well
    """
    if topk > 1 and page_size > 1:
        raise NotImplementedError(f"top-k {topk} with pages of {page_size} tokens: not on the CPU engine")
    count = topk * speculative_num_steps
    rows, columns, inside = _branch_slots(req_pool_indices, seq_lens, count, pool_len)
    req_to_token[rows[inside], columns[inside]] = out_cache_loc.view(-1, count)[inside].to(req_to_token.dtype)


def assign_draft_cache_locs_page_size_1(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, speculative_num_steps
) -> None:  # fmt: skip
    """Read the draft's slots, reserved behind the tokens of each request, into ``out_cache_loc``."""
    rows, columns, inside = _branch_slots(req_pool_indices, seq_lens, topk * speculative_num_steps, pool_len)
    slots = req_to_token[rows, columns.clamp(max=pool_len - 1)].where(inside, 0)  # slot 0 is there to be overwritten
    out_cache_loc.copy_(slots.flatten())


def create_extend_after_decode_spec_info(
    accept_tokens, seq_lens, accept_lens, positions, bonus_tokens, *_block_sizes
) -> None:  # fmt: skip
    """Positions of the accepted tokens, and the last one of each request; ``seq_lens`` counts them already."""
    lengths = accept_lens.long()
    positions.copy_(_ranges(seq_lens - lengths, lengths))
    bonus_tokens.copy_(accept_tokens[lengths.cumsum(0) - 1])


def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, num_draft_tokens) -> None:
    """The last accepted token of each request, where each has a row of tokens.

    The kernel's ``num_draft_tokens`` is the length of a row; with top-k 1, the only one here, so is ``depth + 1``.
    """
    rows = accept_tokens.view(-1, num_draft_tokens)
    bonus_tokens.copy_(rows.gather(1, accept_lens.long()[:, None] - 1).squeeze(1))


def align_evict_mask_to_page_size(seq_lens, evict_mask, page_size, num_draft_tokens, *_block_sizes) -> None:
    """Spare, among the slots to be freed, those on the page where the last token that stays lies."""
    mask = evict_mask.view(-1, num_draft_tokens)
    last_kept = seq_lens + (~mask).sum(1) - 1
    page_start = last_kept // page_size * page_size - seq_lens
    column = torch.arange(num_draft_tokens)
    mask &= (column < page_start[:, None]) | (column >= page_start[:, None] + page_size)


def alloc_extend_kernel(prefix_lens, seq_lens, last_loc, free_pages, out_indices, _bs_upper, page_size) -> None:
    """Slots for the tokens from ``prefix_lens`` to ``seq_lens``: the rest of the last page, then free pages in turn.

    Writes nothing when there are too few free pages; the caller finds that out itself.
    """
    first_new_page = (prefix_lens + page_size - 1) // page_size
    new_pages = (seq_lens + page_size - 1) // page_size - first_new_page
    if int(new_pages.sum()) > len(free_pages):
        return
    lengths = (seq_lens - prefix_lens).long()
    position = _ranges(prefix_lens, lengths)

    def each(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(lengths)

    page = position // page_size - each(first_new_page)  # negative: on the page of the last token
    number = page + each(new_pages.cumsum(0) - new_pages)
    out_indices.copy_(each(last_loc + 1 - prefix_lens) + position)
    on_new_page = page >= 0
    out_indices[on_new_page] = free_pages[number[on_new_page]] * page_size + position[on_new_page] % page_size


def alloc_decode_kernel(seq_lens, last_loc, free_pages, out_indices, bs_upper, page_size) -> None:
    """:func:`alloc_extend_kernel` for one token a request."""
    alloc_extend_kernel(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, bs_upper, page_size)
