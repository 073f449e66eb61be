"""The emulated device's memory: what counts, when it is freed, and what happens at the limit."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cocktail.offload.ledger import Ledger, LedgerOutOfMemoryError


def test_tensors_count_once_and_views_not_at_all() -> None:
    with Ledger() as ledger:
        whole = torch.empty(1000)
        part = whole[:10]
        turned = whole.view(10, 100).transpose(0, 1)
        assert ledger.held_bytes == 4000
        del whole
        assert ledger.held_bytes == 4000  # its views hold it
        copied = turned.contiguous()
        assert ledger.held_bytes == 8000
        del part, turned
        assert ledger.held_bytes == 4000
        copied.add_(1)
        assert ledger.held_bytes == 4000
        del copied
    assert ledger.held_bytes == 0
    assert ledger.peak_bytes == 8000


def test_what_python_numbers_become_counts() -> None:
    with Ledger() as ledger:
        ids = torch.tensor([1, 2, 3])
        assert ledger.held_bytes == ids.nbytes


def test_tensors_of_the_host_and_of_before_count_nothing() -> None:
    before = torch.ones(100)
    with Ledger() as ledger:
        with ledger.host():
            hidden = torch.ones(100)
            with ledger.host(False):
                rows = hidden.clone()
        views = before[:10], hidden[:10]
        assert ledger.held_bytes == rows.nbytes
        total = before + hidden
        assert ledger.held_bytes == rows.nbytes + total.nbytes
    assert [view.shape[0] for view in views] == [10, 10]


def test_operations_with_several_results_count_each_new_one() -> None:
    with Ledger() as ledger:
        values, places = torch.zeros(8).sort()
        assert ledger.held_bytes == torch.zeros(8).nbytes + values.nbytes + places.nbytes - values.nbytes
        left, right = values.split(4)
        assert ledger.held_bytes == values.nbytes + places.nbytes
        assert left.shape == right.shape


def test_temporaries_within_a_module_are_seen() -> None:
    layer = nn.Linear(64, 256, bias=False).requires_grad_(False)
    with torch.inference_mode(), Ledger() as ledger:
        rows = torch.ones(10, 64)
        result = torch.nn.functional.silu(layer(rows)).sum()
        assert ledger.held_bytes == rows.nbytes + result.nbytes
    assert ledger.peak_bytes == (10 * 64 + 2 * 10 * 256) * 4


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_copies_hidden_in_composite_operations_are_seen(mode: Callable[[], Any]) -> None:
    rows = torch.ones(4, 6)
    with mode(), Ledger() as ledger:
        copies = [rows.to(torch.bfloat16), rows.double(), rows.T.contiguous(), rows.T.reshape(24), rows.T.flatten()]
        assert ledger.held_bytes == sum(copy.nbytes for copy in copies)
        same = [rows.to(torch.float32), rows.contiguous(), rows.reshape(24), rows.flatten()]
        assert ledger.held_bytes == sum(copy.nbytes for copy in copies)
        assert len(same) == 4


def test_more_than_the_limit_is_an_out_of_memory_error_and_leaks_nothing() -> None:
    with Ledger(4000) as ledger:
        kept = torch.empty(900)
        with pytest.raises(torch.OutOfMemoryError, match="4,000 bytes and 4,400"):
            torch.empty(200)
        gc.collect()
        assert ledger.held_bytes == kept.nbytes
        assert torch.empty(100).nbytes + kept.nbytes == 4000
    assert issubclass(LedgerOutOfMemoryError, torch.OutOfMemoryError)


def test_it_counts_again_when_it_is_entered_again() -> None:
    ledger = Ledger()
    with ledger:
        kept = torch.empty(10)
    outside = torch.empty(10)
    with ledger:
        more = torch.empty(10)
    assert ledger.held_bytes == kept.nbytes + more.nbytes
    assert outside.nbytes == 40


def test_other_threads_are_not_counted() -> None:
    held: list[torch.Tensor] = []
    with Ledger() as ledger:
        thread = threading.Thread(target=lambda: held.append(torch.empty(1000)))
        thread.start()
        thread.join()
        assert held[0].nbytes == 4000
        assert ledger.held_bytes == 0


def test_storages_whose_end_went_unnoticed_are_found_before_memory_runs_out() -> None:
    with Ledger(4000) as ledger:
        lost = torch.empty(900)
        address = lost.untyped_storage()._cdata
        # As if an interrupt had ended the call that tells of it.
        ledger._storages[address] = (weakref.ref(lost.untyped_storage()), lost.nbytes)
        del lost
        assert ledger.held_bytes == 3600
        kept = torch.empty(500)
        assert ledger.held_bytes == kept.nbytes == 2000
    assert ledger.peak_bytes == 3600
