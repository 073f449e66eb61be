"""The Cocktail paper's numbers (arXiv 2503.23294), as its text and tables have them; no bar of its figures is read."""

from __future__ import annotations

from collections.abc import Mapping

# By what a row is called here, then by what the paper's column is called.
PaperNumbers = Mapping[str, Mapping[str, float | str]]

_DATASETS = ("Qasper", "QMSum", "MultiNews", "TREC", "TriviaQA", "SAMSum", "LCC", "RepoBench-P", "Average")
# "The KV Cache is quantized to INT2 and INT4 uniformly in Atom and KIVI, respectively" (section IV-A).
_METHODS = ("fp16", "atom", "kivi-4", "kvquant", "cocktail-paper")
TABLE2 = {
    "Llama2-7B": (
        (9.63, 21.32, 3.47, 66, 87.74, 41.81, 66.62, 59.77, 44.55),
        (9.03, 20.14, 2.8, 65.2, 87.46, 41.25, 66.78, 59.02, 43.96),
        (9.18, 20.66, 1.38, 65.7, 87.42, 41.53, 66.45, 59.43, 43.97),
        (9.24, 21.02, 3.08, 65.8, 87.48, 41.52, 66.94, 58.93, 44.25),
        (9.67, 21.21, 3.21, 66, 87.66, 42.08, 67.58, 59.1, 44.56),
    ),
    "Llama2-13B": (
        (9.44, 21.25, 3.74, 70.3, 88.02, 43.89, 66.64, 56.82, 45.01),
        (8.63, 20.34, 4.56, 69.4, 86.75, 43.18, 64.22, 55.35, 44.05),
        (8.58, 20.69, 4.39, 69.5, 87.03, 43.31, 65.08, 55.46, 44.26),
        (8.66, 20.87, 4.55, 70, 87.85, 43.34, 65.38, 55.76, 44.55),
        (8.79, 21.03, 4.82, 70, 87.37, 43.97, 66.15, 56.65, 44.85),
    ),
    "Mistral-7B": (
        (32.99, 24.24, 27.1, 71, 86.23, 42.96, 54.02, 51.92, 48.8),
        (30.54, 23.66, 26.35, 70.32, 85.79, 42.18, 53.27, 51.64, 47.97),
        (30.72, 23.98, 26.93, 67.8, 86, 43.34, 53.59, 51.73, 48.39),
        (31.32, 23.85, 26.73, 70.44, 86.07, 42.23, 53.85, 51.67, 48.27),
        (32.67, 24.11, 27.07, 71, 86.36, 43.62, 53.16, 51.94, 48.74),
    ),
    "Longchat-7B": (
        (29.41, 22.77, 26.61, 66.5, 83.99, 40.9, 52.94, 56.78, 47.49),
        (28.44, 21.56, 25.75, 64.8, 83.62, 40.77, 50.4, 54.58, 46.24),
        (28.69, 22.59, 26.28, 66.5, 83.19, 40.28, 52.4, 55.13, 46.88),
        (29.6, 22.48, 26.38, 66.52, 83.59, 40.82, 51.46, 55.33, 47.02),
        (31.88, 22.65, 26.43, 66.5, 83.88, 41.1, 51.95, 55.42, 47.48),
    ),
}
TABLE3: PaperNumbers = {
    f"chunk {size}": {"Rouge Score": score}
    for size, score in {8: 21.24, 16: 21.19, 32: 21.21, 64: 20.15, 128: 19.82, 256: 16.35}.items()
}
_TABLE4_COLUMNS = ("Qasper", "SAMSum", "TriviaQA", "RepoBench-P")
_TABLE4 = {
    "fp16": (9.52, 41.69, 87.72, 59.82),
    "ada-002": (8.89, 41.34, 86.69, 58.32),
    "bm25": (7.36, 35.67, 84.22, 55.35),
    "llm-embedder": (8.98, 41.56, 87.85, 59.77),
    "contriever": (9.67, 42.08, 88.06, 60.1),
}
TABLE4: PaperNumbers = {name: dict(zip(_TABLE4_COLUMNS, scores, strict=True)) for name, scores in _TABLE4.items()}
_TABLE5_COLUMNS = ("F1 score", "GPU Memory (GB)", "TPOT (µs)")
_TABLE5 = {
    "fp16": (21.32, 17.13, 28214),
    "without search": (19.33, 13.88, 15258),
    "without reordering": (21.27, 20.6, 29653),
    "cocktail-paper": (21.21, 13.7, 15201),
}
TABLE5: PaperNumbers = {name: dict(zip(_TABLE5_COLUMNS, values, strict=True)) for name, values in _TABLE5.items()}


def table2(datasets: tuple[str, ...] = ("QMSum", "Average")) -> PaperNumbers:
    """Table II: some of its columns, of all four models."""
    return {
        method: {
            f"{model}, {dataset}": scores[at][_DATASETS.index(dataset)]
            for model, scores in TABLE2.items()
            for dataset in datasets
        }
        for at, method in enumerate(_METHODS)
    }


def of_method(column: str, words: str, table5: str) -> PaperNumbers:
    """What section IV-B says of Cocktail over four models, beside a column of table V (Llama2-7B)."""
    return {
        "fp16": {f"Llama2-7B, {table5}": TABLE5["fp16"][table5]},
        "cocktail-paper": {column: words, f"Llama2-7B, {table5}": TABLE5["cocktail-paper"][table5]},
    }


# Section IV-B: "reduce the GPU memory usage by 12%-42%", and TPOT "by 32%-52%", "compared to the FP16 precision model".
FIGURE4 = of_method("four models, less than FP16", "12%-42%", "GPU Memory (GB)")
FIGURE5 = of_method("four models, less than FP16", "32%-52%", "TPOT (µs)")
