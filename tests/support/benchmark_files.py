"""Write a folder of local data with a few prompts per benchmark in its subfolder `benchmarks`."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.data_mapping import write_mapping

COLUMNS = {
    "arc_challenge_test": "question",
    "gsm8k_test": "question",
    "hellaswag_validation": "query",
    "mmlu_test": "question",
    "truthfulqa_generation": "question",
    "winogrande_validation": "sentence",
}
NAMES = ("arc", "gsm8k", "hellaswag", "mmlu", "truthfulqa", "winogrande")


def write_benchmarks(folder: Path, rows: int = 8) -> Path:
    """Write `rows` prompts per benchmark, each with its row number and longer than the last; return the folder."""
    write_mapping(folder)
    (folder / "benchmarks").mkdir(exist_ok=True)
    for name, (file, column) in zip(NAMES, COLUMNS.items(), strict=True):
        texts = [f"{name} asks for number {row}" + " and one more" * row for row in range(rows)]
        pq.write_table(pa.table({"id": list(range(rows)), column: texts}), folder / "benchmarks" / f"{file}.parquet")
    return folder
