"""Several files read as one document, for questions about all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from cocktail.document import Document
from cocktail.page import Page

SEVERAL = "several"


def join_documents(documents: Sequence[Document]) -> Document:
    """One document of the pages of several, each with its number in its file.

    The first page of each file begins with a line that names it, which is no part of the page in the file: it is read,
    and neither quoted nor counted in the offsets of citations.

    Args:
        documents: At least one.
    """
    first = documents[0]
    if len(documents) == 1:
        return first
    pages: list[Page] = []
    for document in documents:
        own = [replace(page, file=document.path) for page in document.pages]
        name = "standard input" if document.path == "-" else PurePath(document.path).name
        heading = f"File: {name}\n\n"
        pages += [replace(own[0], text=heading + own[0].text, heading=len(heading)), *own[1:]]
    formats = {document.format for document in documents}
    return Document(
        path=", ".join(document.path for document in documents),
        format=first.format if len(formats) == 1 else SEVERAL,
        sha256=hashlib.sha256("\n".join(document.sha256 for document in documents).encode()).hexdigest(),
        pages=tuple(pages),
        page_count=sum(document.page_count for document in documents),
        warnings=tuple(warning for document in documents for warning in document.warnings),
        is_locked=any(document.is_locked for document in documents),
    )
