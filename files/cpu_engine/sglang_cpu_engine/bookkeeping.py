"""KV slots and positions: what SGLang computes in small Triton kernels, in torch.

Each function has the parameters of the kernel whose name it bears; :mod:`.plugin` wraps them so that they are called
like one. ``req_to_token`` is ``(requests, context)``: the KV slot of each token of each request.
"""

import torch


def _within(lengths: torch.Tensor) -> torch.Tensor:
    """0 .. length - 1 for each length in turn: ``(sum of lengths,)``."""
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1]) if len(ends) else 0) - (ends - lengths).repeat_interleave(lengths)


def assign_req_to_token_pool(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *_sizes
) -> None:
    """Write the new slots, request after request, at tokens ``start_offset`` to ``end_offset`` of each request."""
    lengths = (end_offset - start_offset).long()
    columns = start_offset.repeat_interleave(lengths) + _within(lengths)
    rows = req_pool_indices.repeat_interleave(lengths)
    req_to_token[rows, columns] = out_cache_loc[: len(rows)].to(req_to_token.dtype)


def assign_draft_cache_locs(
    req_pool_indices, req_to_token, seq_lens, _extend_lens, _num_new_pages_per_topk, out_cache_loc, _source_cache_loc,
    _target_cache_loc, _last_page_lens_cumsum, _duplicate_cache_len, pool_len, topk, speculative_num_steps, page_size,
    *_sizes,
) -> None:  # fmt: skip
    """Write the draft's slots, ``topk`` branches of ``speculative_num_steps``, behind each request's tokens."""
    if page_size > 1 and topk > 1:
        raise NotImplementedError("top-k above 1 with pages of several tokens")
    count = topk * speculative_num_steps
    columns = seq_lens[:, None] + torch.arange(count)
    inside = columns < pool_len
    rows = req_pool_indices[:, None].expand_as(columns)
    req_to_token[rows[inside], columns[inside]] = out_cache_loc.view(-1, count)[inside].to(req_to_token.dtype)


def create_extend_after_decode_spec_info(
    accept_tokens, seq_lens, accept_lens, positions, bonus_tokens, *_sizes
) -> None:
    """Positions of the accepted tokens and each request's last one; ``seq_lens`` counts them already."""
    lengths = accept_lens.long()
    positions.copy_((seq_lens - accept_lens).repeat_interleave(lengths) + _within(lengths))
    bonus_tokens.copy_(accept_tokens[lengths.cumsum(0) - 1])
