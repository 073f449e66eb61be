from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.poison import poisoned_empty


@pytest.fixture(scope="module", autouse=True)
def nan_memory() -> Iterator[None]:
    with poisoned_empty():
        yield
