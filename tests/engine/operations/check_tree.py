"""Building and verifying draft trees, against references that follow pointers from node to node."""

import itertools
import random

import pytest
import torch
from sglang_cpu_engine import tree


class Node:
    def __init__(self, parent, score, choice):
        self.parent, self.score, self.choice = parent, score, choice
        self.children = []

    def path(self):
        return [self] if self.parent is None else [*self.parent.path(), self]


def draft(rng, topk, depth, n):
    """A draft as EAGLE makes it: nodes in the tree, root first; choices that were expanded; those selected."""
    root = Node(None, 1.0, -1)
    choices, expanded, frontier = [], [], [root]
    for step in range(depth):
        fresh = []
        for node in frontier:
            fresh += [Node(node, node.score * rng.uniform(0.1, 1), len(choices) + len(fresh) + i) for i in range(topk)]
        choices += fresh
        frontier = sorted(fresh, key=lambda node: -node.score)[:topk]
        if step < depth - 1:
            expanded += [node.choice for node in frontier]
    selected = sorted(sorted(choices, key=lambda node: -node.score)[: n - 1], key=lambda node: node.choice)
    return [root, *selected], [-1, *expanded], [node.choice for node in selected]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("mode", [tree.FULL_MASK, tree.QLEN_ONLY])
def test_build_tree(seed, mode):
    rng = random.Random(seed)
    topk, depth, bs = rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 6)
    n = 1 + rng.randint(1, topk + (depth - 1) * topk * topk)
    drafts = [draft(rng, topk, depth, n) for _ in range(bs)]
    seq_lens = torch.tensor([rng.randint(1, 40) for _ in range(bs)])
    columns = [int(length) + n if mode == tree.FULL_MASK else n for length in seq_lens]
    mask = torch.tensor([rng.random() < 0.5 for length in columns for _ in range(n * length)])
    before = mask.clone()
    positions = torch.empty(bs * n, dtype=torch.long)
    index, first_child, next_sibling = torch.full((3, bs, n), -1)
    parent_list = [parents for _, parents, _ in drafts] if depth > 1 else [[] for _ in drafts]
    tree.build_tree_kernel_efficient(
        torch.tensor(parent_list), torch.tensor([chosen for *_, chosen in drafts]), seq_lens, mask, positions, index,
        first_child, next_sibling, topk, depth, n, mode,
    )  # fmt: skip

    assert index.flatten().tolist() == list(range(bs * n))
    offset = 0
    for request, (nodes, _, _) in enumerate(drafts):
        seq_len, rows = int(seq_lens[request]), columns[request]
        for i, node in enumerate(nodes):
            assert positions[request * n + i] == seq_len + len(node.path()) - 1
            children = [j for j, other in enumerate(nodes) if other.parent is node]
            found, child = [], int(first_child[request, i])
            while child != -1:
                found.append(child)
                child = int(next_sibling[request, child])
            assert found == children
            row = mask[offset + i * rows : offset + (i + 1) * rows]
            assert row[-n:].tolist() == [other in node.path() for other in nodes]
            assert row[:-n].equal(before[offset + i * rows : offset + (i + 1) * rows][:-n]), "before the tree"
        offset += n * rows


def test_a_node_without_its_parent_stays_out_of_the_tree():
    # Choices 0 and 1 are the root's, 2 and 3 belong to choice 1, which is not in the tree.
    first_child, next_sibling, index = torch.full((3, 1, 3), -1)
    mask, positions = torch.ones(3 * (4 + 3), dtype=torch.bool), torch.empty(3, dtype=torch.long)
    tree.build_tree_kernel_efficient(
        torch.tensor([[-1, 1, 0]]), torch.tensor([[0, 2]]), torch.tensor([4]), mask, positions, index, first_child,
        next_sibling, 2, 2, 3,
    )  # fmt: skip
    assert (first_child.tolist(), next_sibling.tolist()) == ([[1, -1, -1]], [[-1, -1, -1]])


def test_bit_packed_masks_are_refused():
    with pytest.raises(NotImplementedError, match="FULL_MASK and QLEN_ONLY"):
        tree.build_tree_kernel_efficient(*[torch.zeros(1, 1, dtype=torch.long)] * 8, 1, 1, 1, 2)


def random_trees(rng, bs, n, words):
    """Parents, first children, next siblings and words of `bs` random trees; children in ascending order."""
    parents = [[None] + [rng.randrange(i) for i in range(1, n)] for _ in range(bs)]
    first_child, next_sibling = torch.full((2, bs, n), -1)
    for request, parent in enumerate(parents):
        for node in range(n):
            children = [child for child in range(1, n) if parent[child] == node]
            if children:
                first_child[request, node] = children[0]
            for child, sibling in itertools.pairwise(children):
                next_sibling[request, child] = sibling
    return (
        parents,
        first_child,
        next_sibling,
        torch.tensor([[rng.randrange(words) for _ in range(n)] for _ in range(bs)]),
    )


def verify(operation, bs, n, longest, **inputs):
    predicts = torch.full((bs * n + 1,), -7, dtype=torch.int32)
    accept_index = torch.full((bs, longest), -1, dtype=torch.int32)
    accepted = torch.empty(bs, dtype=torch.int32)
    operation(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted,
        retrive_index=torch.arange(bs * n).view(bs, n), **inputs,
    )  # fmt: skip
    return predicts, accept_index, accepted


@pytest.mark.parametrize("seed", range(100))
def test_verify_greedy(seed):
    rng = random.Random(seed)
    bs, n, longest, words = rng.randint(1, 5), rng.randint(1, 12), rng.randint(1, 6), rng.randint(2, 4)
    parents, first_child, next_sibling, candidates = random_trees(rng, bs, n, words)
    best = torch.tensor([[rng.randrange(words) for _ in range(n)] for _ in range(bs)])
    predicts, accept_index, accepted = verify(
        tree.verify_tree_greedy, bs, n, longest, candidates=candidates, retrive_next_token=first_child,
        retrive_next_sibling=next_sibling, target_predict=best,
    )  # fmt: skip

    expected = torch.full_like(predicts, -7)
    for request, parent in enumerate(parents):
        path = [0]
        while len(path) < longest:
            node = path[-1]
            fitting = [i for i in range(n) if parent[i] == node and candidates[request, i] == best[request, node]]
            if not fitting:
                break
            path.append(fitting[0])
        assert accept_index[request].tolist() == [request * n + i for i in path] + [-1] * (longest - len(path))
        assert accepted[request] == len(path) - 1
        for node in path:
            expected[request * n + node] = best[request, node]
    assert predicts.equal(expected)


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize(("threshold_single", "threshold_acc"), [(1.0, 1.0), (0.6, 0.8)])
def test_verify_sampling(seed, threshold_single, threshold_acc):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    bs, n, longest, words = rng.randint(1, 5), rng.randint(1, 12), rng.randint(1, 6), rng.randint(12, 20)
    parents, first_child, next_sibling, _ = random_trees(rng, bs, n, words)
    candidates = torch.stack([torch.randperm(words)[:n] for _ in range(bs)])  # siblings differ, as a draft's do
    probs = torch.rand(bs, n, words).pow(4)
    probs /= probs.sum(-1, keepdim=True)
    coins, last_coins = torch.rand(bs, n), torch.rand(bs)
    predicts, accept_index, accepted = verify(
        tree.tree_speculative_sampling_target_only, bs, n, longest, candidates=candidates,
        retrive_next_token=first_child, retrive_next_sibling=next_sibling, uniform_samples=coins,
        uniform_samples_for_final_sampling=last_coins, target_probs=probs, draft_probs=torch.zeros_like(probs),
        threshold_single=threshold_single, threshold_acc=threshold_acc,
    )  # fmt: skip

    for request, parent in enumerate(parents):
        path, remaining = [0], probs[request, 0].tolist()
        while len(path) < longest:
            node, used, chosen = path[-1], 0.0, None
            for child in (i for i in range(n) if parent[i] == node):
                probability = float(probs[request, node, candidates[request, child]])
                used += probability
                if float(coins[request, node]) * threshold_acc <= used or probability >= threshold_single:
                    chosen = child
                    break
                remaining[int(candidates[request, child])] = 0.0
            if chosen is None:
                break
            assert predicts[request * n + node] == candidates[request, chosen]
            path.append(chosen)
            remaining = probs[request, chosen].tolist()
        assert accept_index[request].tolist() == [request * n + i for i in path] + [-1] * (longest - len(path))
        assert accepted[request] == len(path) - 1
        target, word = float(last_coins[request]) * sum(remaining), 0
        while (target := target - remaining[word]) >= 0:
            word += 1
        assert predicts[request * n + path[-1]] == word


def test_sampled_words_are_distributed_as_the_target_says():
    """The first two words, over many coins, against the target's distribution; seeded, so it cannot fail by chance."""
    torch.manual_seed(0)
    n, words, draws = 6, 5, 60_000
    # Root 0 with children 1, 2; children 3, 4 of node 1; child 5 of node 2.
    first_child = torch.tensor([[1, 3, 5, -1, -1, -1]]).expand(draws, -1)
    next_sibling = torch.tensor([[-1, 2, -1, 4, -1, -1]]).expand(draws, -1)
    candidates = torch.tensor([[0, 1, 3, 2, 0, 4]]).expand(draws, -1)
    probs = torch.softmax(torch.randn(n, words), -1)
    predicts, accept_index, _ = verify(
        tree.tree_speculative_sampling_target_only, draws, n, 3, candidates=candidates,
        retrive_next_token=first_child, retrive_next_sibling=next_sibling, uniform_samples=torch.rand(draws, n),
        uniform_samples_for_final_sampling=torch.rand(draws), target_probs=probs.expand(draws, -1, -1),
        draft_probs=torch.zeros(1),
    )  # fmt: skip
    rows = predicts[:-1].view(draws, n).long()
    node = accept_index[:, 1].long() - torch.arange(draws) * n

    def close(drawn, expected):
        observed = torch.bincount(drawn, minlength=words) / len(drawn)
        assert (observed - expected).abs().max() < 4 * (0.25 / len(drawn)) ** 0.5

    close(rows[:, 0], probs[0])
    for child in (1, 2):
        close(rows[node == child, child], probs[child])


@pytest.mark.parametrize("seed", range(40))
def test_renormalisation(seed):
    torch.manual_seed(seed)
    rows, words = 7, 11
    probs = torch.softmax(torch.randn(rows, words) * 2, -1)
    top_k = torch.randint(1, words + 3, (rows,))
    top_p = torch.rand(rows).clamp(min=0.01)
    top_k[0], top_p[0] = 1 << 30, 1.0  # SGLang's values for "off"
    by_k, by_p = tree.top_k_renorm_prob(probs, top_k), tree.top_p_renorm_prob(probs, top_p)
    for row in range(rows):
        order = sorted(range(words), key=lambda word: -float(probs[row, word]))
        kept_k, kept_p, total = order[: int(top_k[row])], [], 0.0
        for word in order:
            kept_p.append(word)
            total += float(probs[row, word])
            if total > float(top_p[row]):
                break
        for result, kept in ((by_k, kept_k), (by_p, kept_p)):
            expected = torch.zeros(words)
            expected[kept] = probs[row, kept] / probs[row, kept].sum()
            torch.testing.assert_close(result[row], expected)
