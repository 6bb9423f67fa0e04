"""Draft trees: building one from the draft's choices, and verifying it against the target.

These are the operations of SGLang's CUDA package ``sgl_kernel`` that the EAGLE workers call, with the same signatures
(its spelling ``retrive_*`` included). Shapes: ``bs`` requests, ``n`` nodes in a tree (node 0 is the token that the
target produced last), ``V`` words. A tree is stored as *first child* (``next_token``) and *next sibling* of each node,
-1 where there is none, both ``(bs, n)``.
"""

import logging

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

    :param parent_list: ``(bs, topk * (depth - 1) + 1)`` choice that each expanded node was, -1 for the root; the first
        ``topk + 1`` columns belong to the first step
    :param selected_index: ``(bs, n - 1)`` numbers of the choices that are in the tree, ascending
    :param verified_seq_len: ``(bs,)`` tokens before the tree
    :param tree_mask: written; flat, per request ``n`` rows of ``verified_seq_len + n`` columns (``FULL_MASK``: the
        columns before the tree are left as they are) or of ``n`` columns (``QLEN_ONLY``)
    :param positions: ``(bs * n,)`` written: position of each node in its sequence
    :param retrive_index: ``(bs, n)`` written: number of each node in the batch
    :param retrive_next_token: ``(bs, n)`` written where there is a child, expected to be -1
    :param retrive_next_sibling: ``(bs, n)`` likewise
    :raises NotImplementedError: for the bit-packed mask, which only GPU backends ask for
    """
    bs, n = verified_seq_len.numel(), draft_token_num
    device = tree_mask.device
    node = torch.arange(n, device=device)

    # The choices of one expansion are `topk` in a row; expansion 0 is the root's.
    expansion = selected_index // topk
    parent = torch.zeros(bs, n, dtype=torch.long, device=device)
    linked = torch.ones(bs, n, dtype=torch.bool, device=device)
    linked[:, 0] = False
    if n > 1 and parent_list.numel():
        parent_choice = parent_list.long().gather(1, expansion.clamp(max=parent_list.shape[1] - 1))
        is_parent = selected_index[:, None, :] == parent_choice[:, :, None]
        from_root = expansion == 0
        parent[:, 1:] = torch.where(from_root, 0, is_parent.long().argmax(-1) + 1)
        linked[:, 1:] = from_root | is_parent.any(-1)
        if not bool(linked[:, 1:].all()):
            # As on a GPU: such a node stays out of the tree and cannot be accepted.
            logger.warning("a draft tree has nodes without their parents: all their probabilities were zero")

    ancestor_or_self = torch.eye(n, dtype=torch.bool, device=device).repeat(bs, 1, 1)
    ancestor_or_self |= linked[:, :, None] & (parent[:, :, None] == node)
    step = ancestor_or_self.float()
    for _ in range(max(depth, 1).bit_length()):  # squaring doubles the length of the paths
        step = (step @ step).clamp(max=1)
    ancestor_or_self = step > 0

    positions.copy_((verified_seq_len[:, None] + ancestor_or_self.sum(-1) - 1).flatten())
    retrive_index.copy_(torch.arange(bs * n, device=device).view(bs, n))

    nobody = torch.full((), n, device=device)
    is_child = linked[:, None, :] & (parent[:, None, :] == node[:, None])  # [b, i, j]: j is a child of i
    first_child = torch.where(is_child, node, nobody).amin(-1)
    is_later_sibling = linked[:, :, None] & linked[:, None, :] & (parent[:, :, None] == parent[:, None, :])
    is_later_sibling &= node > node[:, None]
    next_sibling = torch.where(is_later_sibling, node, nobody).amin(-1)
    retrive_next_token.copy_(first_child.where(first_child < n, -1))
    retrive_next_sibling.copy_(next_sibling.where(next_sibling < n, -1))

    if tree_mask_mode == FULL_MASK:
        tree_mask[tree_mask_indices(verified_seq_len, n)] = ancestor_or_self
    elif tree_mask_mode == QLEN_ONLY:
        tree_mask[: bs * n * n] = ancestor_or_self.flatten()
    else:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: the CPU engine knows FULL_MASK and QLEN_ONLY")


def tree_mask_indices(seq_lens: torch.Tensor, n: int) -> torch.Tensor:
    """Where the flat full mask keeps the tree's own columns: ``(bs, n, n)`` indices."""
    row = seq_lens + n
    start = (row * n).cumsum(0) - row * n
    node = torch.arange(n, device=seq_lens.device)
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
    """Follow the target's best words down the tree, in each request.

    :param predicts: ``(>= bs * n,)`` written at each accepted node: the word that follows it
    :param accept_index: ``(bs, depth + 1)`` written: numbers of the accepted nodes, the root first
    :param accept_token_num: ``(bs,)`` written: accepted nodes without the root
    :param candidates: ``(bs, n)`` words of the nodes
    :param target_predict: ``(bs, n)`` the target's best word after each node
    """
    best = target_predict.tolist()
    words = candidates.tolist()

    def follow(request: int, node: int, children: list[int]) -> int | None:
        return next((child for child in children if words[request][child] == best[request][node]), None)

    _walk(
        follow,
        lambda request, node: best[request][node],
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    )  # fmt: skip


def _walk(
    follow, bonus, predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling
):  # fmt: skip
    words, number = candidates.tolist(), retrive_index.tolist()
    first_child, next_sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    longest = accept_index.shape[1] - 1
    predicted: dict[int, int] = {}
    for request in range(candidates.shape[0]):
        node, accepted = 0, [number[request][0]]
        while len(accepted) <= longest:
            children = []
            child = first_child[request][node]
            while child != -1:
                children.append(child)
                child = next_sibling[request][child]
            chosen = follow(request, node, children)
            if chosen is None:
                break
            predicted[accepted[-1]] = words[request][chosen]
            accepted.append(number[request][chosen])
            node = chosen
        predicted[accepted[-1]] = bonus(request, node)
        accept_index[request, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[request] = len(accepted) - 1
    predicts[list(predicted)] = torch.tensor(list(predicted.values()), dtype=predicts.dtype, device=predicts.device)
