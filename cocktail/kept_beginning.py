"""A document that begins like one in the store: what of its keys and values need not be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from cocktail.context import LayerContext
from cocktail.document_store import DocumentStore
from cocktail.kv_file import DamagedKVError, KvFile
from cocktail.kv_form import KvForm
from cocktail.kv_key import BLOCK_TOKENS, KvKey
from cocktail.offload.accelerator import Accelerator


@dataclass(frozen=True)
class KeptBeginning:
    """The first tokens of a context in another document's file.

    Args:
        path: of the file.
        file: the file.
        tokens: how many.
        accelerator: holds the layers' contexts, None if host memory does.
    """

    path: Path
    file: KvFile
    tokens: int
    accelerator: Accelerator | None

    def fill(self, index: int, context: LayerContext) -> None:
        """Writes a layer's to the front of its context.

        Raises:
            DamagedKVError: They are not what was written.
        """
        for into, kept in zip((context.key, context.value), self.file.parts(index), strict=True):
            place, first = into[:, : self.tokens], kept[:, : self.tokens]
            if self.accelerator is None:
                place.copy_(first)
            else:
                self.accelerator.fetch_into(first, place)


def find_beginning(
    store: DocumentStore,
    key: KvKey,
    blocks: Sequence[str],
    form: KvForm,
    segment_tokens: int,
    accelerator: Accelerator | None,
) -> KeptBeginning | None:
    """The longest beginning that another document's file shares with a context; None if there is none.

    It ends where a segment of the prefill does, so that the rows after it are computed as they would be without it.

    Args:
        store: the files.
        key: of the context, in the exact form.
        blocks: see `block_digests`.
        form: the context's.
        segment_tokens: rows of a prefill segment.
        accelerator: see `KeptBeginning`.
    """
    best, longest = None, 0
    for path, others in store.same_start(key):
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(blocks, others, strict=False)))
        tokens = shared * BLOCK_TOKENS // segment_tokens * segment_tokens
        if tokens > longest:
            best, longest = path, tokens
    if best is None:
        return None
    try:
        file = KvFile(best, form)
    except DamagedKVError:
        store.damaged(best)
        return None
    except OSError:
        return None
    store.used(best)
    return KeptBeginning(best, file, longest, accelerator)
