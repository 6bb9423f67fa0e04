"""Draft trees: building one from the draft's choices, and verifying it against the target.

These are the operations of SGLang's CUDA package ``sgl_kernel`` that the EAGLE workers call, with the same signatures
(its spelling ``retrive_*`` included). Shapes: ``bs`` requests, ``n`` nodes in a tree (node 0, the root, is the token
that the target produced last), ``V`` words in the vocabulary. A tree is given by the first child (``next_token``) and
the next sibling of each node, both ``(bs, n)`` and -1 where there is none.
"""
# ruff: noqa: PLR0917 (the signatures are SGLang's)

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

FULL_MASK, QLEN_ONLY = 0, 1  # sglang.srt.speculative.eagle_utils.TreeMaskMode


def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = FULL_MASK,
) -> None:
    """Fill in the tree that the draft's best ``n - 1`` choices span.

    The draft's choices are numbered step after step; a node that was expanded has ``topk`` choices in a row.

    :param parent_list: ``(bs, topk * (depth - 1) + 1)`` the choice that was expanded there, -1 for the root; empty when
        ``depth`` is 1
    :param selected_index: ``(bs, n - 1)`` the choices that are in the tree, ascending: nodes 1 to ``n - 1``
    :param verified_seq_len: ``(bs,)`` tokens before the tree
    :param tree_mask: written: flat, per request ``n`` rows, of ``verified_seq_len + n`` columns (``FULL_MASK``; those
        before the tree are left alone) or of ``n`` columns (``QLEN_ONLY``): a node's ancestors and itself
    :param positions: ``(bs * n,)`` written: position of each node in its sequence
    :param retrive_index: ``(bs, n)`` written: number of each node in the batch
    :param retrive_next_token: ``(bs, n)`` written: first child
    :param retrive_next_sibling: ``(bs, n)`` written: next sibling
    :raises NotImplementedError: for the bit-packed mask, which only GPU backends ask for
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: the CPU engine knows FULL_MASK and QLEN_ONLY")
    bs, n = verified_seq_len.numel(), draft_token_num
    node = torch.arange(n)

    parent = torch.zeros(bs, n, dtype=torch.long)
    linked = torch.ones(bs, n, dtype=torch.bool)
    linked[:, 0] = False
    if depth > 1:
        expansion = selected_index // topk
        is_parent = selected_index[:, None, :] == parent_list.long().gather(1, expansion)[:, :, None]
        parent[:, 1:] = torch.where(expansion == 0, 0, is_parent.long().argmax(-1) + 1)
        linked[:, 1:] = (expansion == 0) | is_parent.any(-1)
        if not linked[:, 1:].all():
            # Happens when probabilities are zero; as on a GPU, such a node stays out of the tree.
            logger.warning("a draft tree has nodes without their parents")

    is_parent = linked[:, :, None] & (parent[:, :, None] == node)  # [b, i, j]: j is the parent of i
    reaches = (torch.eye(n, dtype=torch.bool) | is_parent).float()
    for _ in range(depth.bit_length()):  # each product doubles the length of the paths that are covered
        reaches = (reaches @ reaches).clamp(max=1)
    ancestor_or_self = reaches > 0

    positions.copy_((verified_seq_len[:, None] + ancestor_or_self.sum(-1) - 1).flatten())
    retrive_index.copy_(torch.arange(bs * n).view(bs, n))

    def first(candidates: torch.Tensor) -> torch.Tensor:
        return torch.where(candidates.any(-1), candidates.long().argmax(-1), -1)

    retrive_next_token.copy_(first(is_parent.transpose(1, 2)))
    same_parent = linked[:, :, None] & linked[:, None, :] & (parent[:, :, None] == parent[:, None, :])
    retrive_next_sibling.copy_(first(same_parent & (node > node[:, None])))

    if tree_mask_mode == FULL_MASK:
        tree_mask[full_mask_indices(verified_seq_len, n)] = ancestor_or_self
    else:
        tree_mask[: bs * n * n] = ancestor_or_self.flatten()


def full_mask_indices(seq_lens: torch.Tensor, n: int) -> torch.Tensor:
    """Where the flat full mask keeps the trees' own columns: ``(bs, n, n)``."""
    row = seq_lens + n
    start = (row.cumsum(0) - row) * n
    node = torch.arange(n)
    return (start + seq_lens)[:, None, None] + row[:, None, None] * node[:, None] + node


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the path on which each word is the target's best one.

    :param predicts: at least ``(bs * n,)``, written at each accepted node: the word after it
    :param accept_index: ``(bs, depth + 1)`` expected to be -1, written: numbers of the accepted nodes, the root first
    :param accept_token_num: ``(bs,)`` written: how many were accepted, without the root
    :param candidates: ``(bs, n)`` words of the nodes
    :param retrive_index: ``(bs, n)`` numbers of the nodes in the batch
    :param retrive_next_token: ``(bs, n)`` first child
    :param retrive_next_sibling: ``(bs, n)`` next sibling
    :param target_predict: ``(bs, n)`` the target's best word after each node
    """
    best, words = target_predict.tolist(), candidates.tolist()

    def choose(request: int, node: int, children: list[int]) -> int | None:
        return next((child for child in children if words[request][child] == best[request][node]), None)

    last, _ = _descend(
        choose, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
        retrive_next_sibling,
    )  # fmt: skip
    requests = torch.arange(len(last))
    predicts[retrive_index[requests, last]] = target_predict[requests, last].to(predicts.dtype)


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Sample a path such that its words are distributed as the target's own samples.

    One uniform number per node picks among its children by their target probabilities, in order; when it falls
    beyond their sum, the next word is drawn from the target's distribution without these children, and the path ends.

    Parameters as in :func:`verify_tree_greedy`, and

    :param uniform_samples: ``(bs, n)`` uniform numbers in [0, 1)
    :param uniform_samples_for_final_sampling: ``(bs,)`` likewise, for the word after the path
    :param target_probs: ``(bs, n, V)`` the target's distribution after each node
    :param draft_probs: unused, as in SGLang: the verification does not look at the draft's distribution
    :param threshold_single: a child with at least this target probability is accepted at once
    :param threshold_acc: the sum of probabilities is divided by it; below 1 more is accepted than the target would say
    """
    words, coins = candidates.tolist(), uniform_samples.tolist()
    # probability[b][i][j]: of node j's word after node i
    probability = target_probs.gather(2, candidates[:, None, :].expand(-1, candidates.shape[1], -1).long()).tolist()

    def choose(request: int, node: int, children: list[int]) -> int | None:
        total = 0.0
        for child in children:
            single = probability[request][node][child]
            total += single
            if coins[request][node] <= total / threshold_acc or single >= threshold_single:
                return child
        return None

    last, rejected = _descend(
        choose, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
        retrive_next_sibling,
    )  # fmt: skip
    requests = torch.arange(len(last))
    full = target_probs[requests, last].double()
    remaining = full.clone()
    for request, children in enumerate(rejected):
        remaining[request, [words[request][child] for child in children]] = 0
    # Rounding can leave nothing although the last child was refused by a hair: then any of the target's words is right.
    remaining = torch.where(remaining.sum(-1, keepdim=True) > 0, remaining, full)
    cumulative = remaining.cumsum(-1)
    drawn = (cumulative > uniform_samples_for_final_sampling[:, None] * cumulative[:, -1:]).long().argmax(-1)
    predicts[retrive_index[requests, last]] = drawn.to(predicts.dtype)


def _descend(
    choose: Callable[[int, int, list[int]], int | None],
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
) -> tuple[list[int], list[list[int]]]:
    """Walk down each tree while `choose` names a child, and write the path.

    A walk over Python lists: a tree has a dozen nodes, so that one torch operation costs more than a whole walk.

    :returns: per request the last accepted node, and its children when `choose` refused them all
    """
    words, numbers = candidates.tolist(), retrive_index.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    longest = accept_index.shape[1]
    last_nodes, refused, predicted = [], [], {}
    for request, number in enumerate(numbers):
        node, path, children = 0, [number[0]], []
        while len(path) < longest:
            children = []
            child = first_child[request][node]
            while child != -1:
                children.append(child)
                child = next_sibling[request][child]
            chosen = choose(request, node, children)
            if chosen is None:
                break
            predicted[path[-1]] = words[request][chosen]
            path.append(number[chosen])
            node, children = chosen, []
        last_nodes.append(node)
        refused.append(children)
        accept_index[request, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[request] = len(path) - 1
    predicts[list(predicted)] = torch.tensor(list(predicted.values()), dtype=predicts.dtype)
    return last_nodes, refused


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` most probable words of each row, scaled to a sum of 1: ``(rows, V)``, ``(rows,)``."""
    ordered, words = probs.sort(dim=-1, descending=True)
    ordered = ordered.where(torch.arange(probs.shape[-1]) < top_k[:, None], 0)
    return torch.empty_like(probs).scatter_(-1, words, ordered / ordered.sum(-1, keepdim=True))


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep of each row the most probable words that reach `top_p` together, scaled to 1: ``(rows, V)``, ``(rows,)``."""
    ordered, words = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.where(before <= top_p[:, None], 0)
    return torch.empty_like(probs).scatter_(-1, words, ordered / ordered.sum(-1, keepdim=True))
