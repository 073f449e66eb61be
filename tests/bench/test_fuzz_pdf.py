"""A few rounds of the fuzzer, and that it would notice."""

from __future__ import annotations

import pytest

pytest.importorskip("resource")

from tests.bench import fuzz_pdf


def test_damaged_pdfs_give_text_or_a_documented_error() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    found = fuzz_pdf.fuzz(40, seed=7)
    assert found["failures"] == []
    assert sum(found["ends"].values()) == 40
    assert len(found["ends"]) > 1
    # Other tests of this process had children too, which count for the peak.
    assert found["reader_peak_bytes"] <= max(1_500_000_000, before)


def test_another_error_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("seen")

    monkeypatch.setattr(fuzz_pdf, "read_document", fail)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert "KeyError: 'seen'" in fuzz_pdf.fuzz(1, seed=0)["failures"][0]
