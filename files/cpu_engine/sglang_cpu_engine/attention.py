"""Attention in torch for every forward mode of SGLang, those of speculative decoding included."""

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch.nn.functional import scaled_dot_product_attention

from sglang_cpu_engine.tree import full_mask_indices


class TorchTreeAttention(AttentionBackend):
    """Attention over padded batches: one boolean mask per forward says which KV slots each query sees.

    :param branches: draft decoding only: branches of the tree (top-k)
    :param branch_length: draft decoding only: KV slots of a branch
    :param step: draft decoding only: number of this step; a branch sees its own first ``step + 1`` slots
    """

    def __init__(self, model_runner, branches: int = 0, branch_length: int = 0, step: int = 0):
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.branches, self.branch_length, self.step = branches, branch_length, step

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode, seq_lens = forward_batch.forward_mode, forward_batch.seq_lens.long()
        if mode.is_idle():
            return
        if mode.is_decode() and self.branches:
            kv_lens = seq_lens + self.branches * self.branch_length
            query_lens = torch.full_like(seq_lens, self.branches)
        elif mode.is_decode():
            kv_lens, query_lens = seq_lens, torch.ones_like(seq_lens)
        elif mode.is_target_verify():
            nodes = forward_batch.spec_info.draft_token_num
            kv_lens, query_lens = seq_lens + nodes, torch.full_like(seq_lens, nodes)
        else:
            kv_lens, query_lens = seq_lens, forward_batch.extend_seq_lens.long()

        column = torch.arange(min(int(kv_lens.max()), self.req_to_token.shape[1]))
        query = torch.arange(int(query_lens.max()))
        if mode.is_decode() and self.branches:
            start = seq_lens[:, None, None] + query[:, None] * self.branch_length
            mask = (column < seq_lens[:, None, None]) | ((column >= start) & (column <= start + self.step))
        elif mode.is_target_verify():
            tree = forward_batch.spec_info.custom_mask[full_mask_indices(seq_lens, nodes)]
            mask = (column < seq_lens[:, None, None]).repeat(1, nodes, 1)
            mask.scatter_(2, (seq_lens[:, None, None] + query).expand(-1, nodes, -1), tree)
        else:
            # Query j of a request is its token kv_len - query_len + j and sees itself and what is before it.
            # Padded queries see the last one's slots: their results are dropped, but must not be NaN.
            last_seen = (kv_lens - query_lens)[:, None] + query
            mask = column <= torch.minimum(last_seen, kv_lens[:, None] - 1)[:, :, None]
        self.kv_slots = self.req_to_token[forward_batch.req_pool_indices, : len(column)].long()
        self.mask = mask
        padded = int(query_lens.sum()) != mask.shape[0] * mask.shape[1]
        self.is_query = (query < query_lens[:, None]) if padded else None

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_kwargs):  # noqa: PLR0917 (SGLang's)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        heads, kv_heads, size = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        keys, values = keys[self.kv_slots].transpose(1, 2), values[self.kv_slots].transpose(1, 2)
        requests, queries = self.mask.shape[:2]
        q = q.view(-1, heads, size)
        if self.is_query is None:
            padded = q.view(requests, queries, heads, size)
        else:
            padded = q.new_zeros(requests, queries, heads, size)
            padded[self.is_query] = q
        # The query heads that share a KV head count as more queries of it: no copy of keys and values.
        group = heads // kv_heads
        grouped = padded.view(requests, queries, kv_heads, group, size).permute(0, 2, 3, 1, 4)
        out = scaled_dot_product_attention(
            grouped.reshape(requests, kv_heads, group * queries, size),
            keys,
            values,
            attn_mask=self.mask.repeat(1, group, 1)[:, None],
            scale=layer.scaling,
        )
        out = out.view(requests, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4).reshape(requests, queries, -1)
        return out.reshape(requests * queries, -1) if self.is_query is None else out[self.is_query]

    forward_decode = forward_extend = _attend


class TorchMultiStepDraft:
    """The draft's decode steps: one backend for each forward that :meth:`EAGLEWorker.draft_forward` makes."""

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        self.attn_backends = [
            TorchTreeAttention(model_runner, branches=topk, branch_length=speculative_num_steps, step=step)
            for step in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)
