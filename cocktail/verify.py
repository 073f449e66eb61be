"""Verification: one pass of the target over a draft tree, and which of its tokens stand.

`match` draws the target's own token at every step and follows the child that has it; `reject` is Leviathan's rule for
chains (arXiv 2211.17192, algorithm 1). Both leave the target's distribution as it is. `match` also leaves the very
tokens that plain decoding with the same seed draws, because a random number belongs to a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from cocktail.attention import forward_logits
from cocktail.draft_tree import DraftTree
from cocktail.kv_cache import MixedKVCache
from cocktail.sampling import Sampler, pick, uniform

# Random numbers of a position beside the one that plain decoding draws with.
ACCEPT, RESIDUAL, DRAFT = 1, 2, 3


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    Args:
        path: accepted nodes, the root first.
        tokens: what is emitted: the accepted tokens, and the one that the target adds.
    """

    path: list[int]
    tokens: list[int]


@torch.inference_mode()
def verification_logits(model: PreTrainedModel, cache: MixedKVCache, tree: DraftTree) -> torch.Tensor:
    """The target's logits after every node, [nodes, vocab_size].

    Keys and values of node i are written to tail slot tail_len + i, over those of the draft; none is committed.
    """
    first, length = cache.tail_len, cache.get_seq_length()
    ids = torch.tensor(tree.tokens, device=cache.device)
    positions = torch.tensor(tree.depths, device=cache.device) + length
    nodes = range(len(tree))
    mask = tree.mask(nodes, nodes, first).to(cache.device) if len(tree) > 1 else None
    cache.begin_tail(first, mask, positions)
    return forward_logits(model, ids, positions, cache, logits_to_keep=0)


def commit_path(cache: MixedKVCache, path: Sequence[int]) -> None:
    """Gathers the slots of accepted nodes at the end of the committed tail."""
    first = cache.tail_len
    cache.commit([first + node for node in path])


def match(tree: DraftTree, logits: torch.Tensor, sampler: Sampler, position: int) -> Verdict:
    """Draws from the target, node after node, as long as the tree holds what is drawn.

    Args:
        logits: [nodes, vocab_size], the target's.
        position: absolute position of the token after the root.

    Raises:
        ModelError: as `Sampler.draw`, for a node that is reached.
    """
    path, tokens = [0], list[int]()
    while True:
        node = tree[path[-1]]
        tokens.append(sampler.draw(logits[path[-1]], position + node.depth))
        if tokens[-1] not in node.children:
            return Verdict(path, tokens)
        path.append(node.children[tokens[-1]])


def reject(
    tree: DraftTree,
    logits: torch.Tensor,
    drafted: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sampler: Sampler,
    position: int,
) -> Verdict:
    """Accepts a chain's tokens with probability min(1, p / q); the first refused one is drawn anew from (p - q)+.

    Args:
        tree: a chain; node i + 1 was drawn from `drafted[i]`.
        logits: [nodes, vocab_size], the target's.
        drafted: probabilities and ids (see `Sampler.probabilities`) that the draft drew each token from.
        position: absolute position of the token after the root.
    """
    path, tokens = [0], list[int]()
    for node, (draft_chances, draft_ids) in enumerate(drafted):
        at, token = position + node, tree[node + 1].token
        p = _dense(*sampler.probabilities(logits[node]), logits.shape[-1])
        q = _dense(draft_chances, draft_ids, logits.shape[-1])
        if uniform(sampler.seed, at, ACCEPT) * float(q[token]) < float(p[token]):
            path.append(node + 1)
            tokens.append(token)
            continue
        residual = (p - q).clamp_(min=0)
        # Rounding may leave nothing where p and q are equal.
        residual = residual if float(residual.sum()) > 0 else p
        tokens.append(pick(residual / residual.sum(), uniform(sampler.seed, at, RESIDUAL)))
        return Verdict(path, tokens)
    tokens.append(sampler.draw(logits[len(drafted)], position + len(drafted)))
    return Verdict(path, tokens)


def _dense(chances: torch.Tensor, ids: torch.Tensor, size: int) -> torch.Tensor:
    dense = torch.zeros(size, dtype=torch.float64, device=chances.device)
    return dense.index_put_((ids.to(chances.device),), chances)
