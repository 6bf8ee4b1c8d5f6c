"""The benches in Python run, check their answers, and become a table; times are not looked at.

They run on little data and against what is installed here, without what only `make bench-peers`
brings.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benches" / "python"


def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("name", "options", "contestants"),
    [
        (
            "plan_peers",
            "--n 2000 --rounds 1 --lengths uniform --peers trl",
            {"multipack best_fit_decreasing", "multipack first_fit", "trl bfd"},
        ),
        (
            "balance_peers",
            "--n 2000 --fixed 2000",
            {"multipack balanced", "multipack balanced, attention", "multipack not balanced"},
        ),
        (
            "batch_peers",
            "--rounds 1 --parts flat,samples",
            {
                "multipack.Collator",
                "multipack.ops.collate",
                "torch: a copy of as many bytes",
                "torch: as_tensor and cat, no more",
                "transformers flattening",
            },
        ),
        (
            "attention_peers",
            "--tokens 4096 --runs 1",
            {
                "multipack.attention",
                "torch: SDPA with the 4D bool mask",
                "torch: SDPA on the samples one by one",
            },
        ),
    ],
)
def test_a_bench_becomes_a_table(
    name: str,
    options: str,
    contestants: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "results.jsonl"
    module = bench(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, *options.split(), "--json", str(path)])

    module.main()

    results = bench("results", monkeypatch).read(path)
    assert contestants <= {result["name"] for result in results}
    assert [result["fault"] for result in results] == [None] * len(results)
    table = "".join(bench("peers", monkeypatch).tables(results))
    for result in results:
        assert f"| {result['name']} | " in table
    assert table.count("| 1.00 |") >= len({result["setting"] for result in results})


def test_what_is_wrong_with_an_answer_is_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = bench("results", monkeypatch)
    kept = results.Results(tmp_path / "results.jsonl")
    kept.add("two samples", "multipack", [0.002, 0.004, 0.003], {"rows": "1"})
    kept.add("two samples", "torch: other", [0.09], {"rows": "2"}, "a sample is lost or repeated")

    table = bench("peers", monkeypatch).tables(results.read(kept.path))

    ours, torch = (metadata.version(name).split("+")[0] for name in ("multipack", "torch"))
    assert table == [
        f"""
| two samples | version | seconds | of ours | rows | answer |
| --- | --- | --- | --- | --- | --- |
| multipack | {ours} | 3.00 ms | 1.00 | 1 | right |
| torch: other | {torch} | 90.0 ms | 30 | 2 | a sample is lost or repeated |
"""
    ]


def test_a_wrong_plan_of_another_is_named_and_one_of_ours_ends_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = bench("plan_peers", monkeypatch)
    lengths = peers.uniform(4)

    def contestant(name: str, rows: list[list[int]]) -> object:
        made = peers.Contestant(name, lambda: rows, peers.from_lists)
        made.time()
        return made

    lost = [[0], [1], [2, 2]]
    assert peers.judge(contestant("other", lost), lengths) == (3, "a sample is lost or repeated")
    full = peers.judge(contestant("other", [[0, 1, 2, 3]]), lengths)
    assert full == (1, f"a row has {lengths.sum()} tokens")
    with pytest.raises(AssertionError, match="multipack tight: a sample is lost or repeated"):
        peers.judge(contestant("multipack tight", lost), lengths)
