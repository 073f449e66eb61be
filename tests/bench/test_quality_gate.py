"""What the default precision may cost a model that is offered by name, on a text of a thousand tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocktail.bench.quality import bench_quality
from cocktail.bench.quality_settings import Comparison, QualityBenchmark
from cocktail.config import Config
from cocktail.report import SilentReporter

HARBOUR = Path(__file__).parents[1] / "fixtures" / "harbour.txt"
QUESTIONS = {
    "Who led the fire brigade when the warehouse burned?": "Captain Ilse Brandt",
    "How much did the repair of the eastern mole cost?": "2.4 million euros",
    "When does the director retire?": "in June",
}


@pytest.mark.slow
def test_complaint_35_a_model_is_close_to_itself_at_16_bits(smollm2_folder: Path, tmp_path: Path) -> None:
    """Far closer than at two bits everywhere, and near enough that it says the same."""
    text = HARBOUR.read_text(encoding="utf-8")
    (tmp_path / "harbour.txt").write_text(text, encoding="utf-8")
    lines = [
        {
            "id": f"{n}",
            "source": "own",
            "document": "harbour.txt",
            "question": q,
            "answers": [a],
            "answer_offset": text.index(a),
        }
        for n, (q, a) in enumerate(QUESTIONS.items())
    ]
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = Config(
        model=str(smollm2_folder), dtype="float32", device="cpu", scorer="bm25", restate=0, max_tokens=24, offline=True
    )
    policies = ("fp16", "cocktail", "cocktail-paper", "int2")
    comparison = Comparison(policies, answers=False, kl_tokens=24)
    result = bench_quality(QualityBenchmark(str(dataset), comparison=comparison), config, SilentReporter()).to_json()
    found = {row["policy"]: row for row in result["variants"]}
    print({policy: (row["kl"]["mean"], row["agreement"]["mean"], row["chunk_bits"]) for policy, row in found.items()})
    assert found["cocktail"]["kl"]["mean"] <= 0.03
    assert found["cocktail"]["agreement"]["mean"] >= 0.9
    for policy in ("cocktail-paper", "int2"):
        assert found["cocktail"]["kl"]["mean"] < found[policy]["kl"]["mean"] / 2, policy
