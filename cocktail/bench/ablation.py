"""What the Cocktail paper's ablation leaves out: the search for the chunks that matter, and their reordering."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cocktail.context import ContextLayout
from cocktail.kv_cache import MixedKVCache
from cocktail.prefilled_context import PrefilledContext
from cocktail.reading import Reading


def shuffled(reading: Reading, seed: int) -> Reading:
    """The reading with each question's scores dealt out to other chunks, drawn by the seed.

    The first chunk keeps its own, which the rule holds unquantized: so each precision has as many chunks as before.
    """
    scores, generator = reading.scores.copy(), np.random.default_rng(seed)
    for row in scores[:, 1:]:
        generator.shuffle(row)
    return replace(reading, scores=scores)


class UnorderedContext(PrefilledContext):
    """A context whose caches hold the chunks in the document's order."""

    def _empty_cache(self, layout: ContextLayout) -> MixedKVCache:
        cache = super()._empty_cache(layout)
        cache.reorder = False
        return cache
