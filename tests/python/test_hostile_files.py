"""Files for `multipack report` that nobody should be able to do harm with: refused in a sentence.

Each is read like any other. What claims to be large is read in a process that has 256 MiB more than
it starts with, so that believing it would end in another error.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from limited import DEEP, limited

from multipack import Collator, Config
from multipack.cli import sources
from multipack.cli.sources import Options, read


def packed_zeros(path: Path, mebibytes: int) -> Path:
    """Write a .npz whose `lengths` unpack to so many zeros."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (mebibytes << 20,)}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("lengths.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(member, header)
        for _ in range(mebibytes):
            member.write(bytes(1 << 20))
    return path


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", DEEP, ":1: JSON that is nested too deeply"),
        ("a.jsonl", "9" * 5000, ":1: not JSON that can be read: Exceeds the limit"),
        (
            "a.jsonl",
            f'{{"length": {2**63}}}',
            f":1: expected at most {2**63 - 1} in `length`, found {2**63}",
        ),
        (
            "a.jsonl",
            f'{{"input_ids": [1, {2**63}]}}',
            ":1: an integer in `input_ids` does not fit into 64 bits",
        ),
        (
            "a.jsonl",
            '{"input_ids": [1, true]}',
            ":1: expected integers in `input_ids`, found a boolean",
        ),
        (
            "a.jsonl",
            '{"length": 1, "count": 1e999}',
            ":1: expected an integer in `count`, found inf",
        ),
        (
            "a.jsonl",
            f'{{"length": 1, "count": {2**62}}}',
            "the histogram has 4,611,686,018,427,387,904 samples",
        ),
        ("a.json", DEEP, ": JSON that is nested too deeply"),
        (
            "a.json",
            f'{{"{"9" * 5000}": 1}}',
            ": record 0: expected an integer in `length`, found a string",
        ),
    ],
)
def test_records_that_are_hostile_are_refused_in_a_sentence(
    name: str, content: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)

    with pytest.raises(Exception, match=r".") as caught:
        read([path], Options(Config(sequence_len=8)))

    assert type(caught.value).__name__ == "CliError"
    assert text in str(caught.value)


def test_texts_among_the_tokens_take_no_memory_of_their_own(tmp_path: Path) -> None:
    """As a NumPy array each of them would be as wide as the widest."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": ["x" * 1_000_000, *[""] * 100_000]}))

    said = limited(f"main(['report', {str(path)!r}, '--sequence-len', '8'])")

    assert said == ["2"]


def test_arrays_that_unpack_to_more_than_they_should_are_refused_in_little_memory(
    tmp_path: Path,
) -> None:
    bomb = packed_zeros(tmp_path / "bomb.npz", 1024)
    lying = tmp_path / "lying.npy"
    np.save(lying, np.zeros(4, np.int64))
    lying.write_bytes(
        lying.read_bytes().replace(b"'shape': (4,), }          ", b"'shape': (9999999999,), } ")
    )
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([print], object), allow_pickle=True)

    said = limited(
        *(
            f"main(['report', {str(path)!r}, '--sequence-len', '8'])"
            for path in (bomb, lying, objects)
        ),
        *(f"main(['plan', 'make', {str(path)!r}, 'out.plan'])" for path in (lying, objects)),
    )

    assert said == ["2"] * 5


def test_a_small_archive_may_still_be_compressed(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", lengths=np.full(100_000, 7), other=np.zeros(3))

    found, _ = read([tmp_path / "a.npz"], Options(Config(sequence_len=8)))

    assert found.lengths.sum() == 700_000


def long_row(path: Path, **options: Any) -> bytes:
    """Write a row of 2^20 equal tokens to a Parquet file; return all of it."""
    tokens = pa.ListArray.from_arrays([0, 1 << 20], pa.array(np.zeros(1 << 20, np.int8)))
    pa.parquet.write_table(pa.table({"input_ids": tokens}), path, write_statistics=False, **options)
    return path.read_bytes()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_parquet_that_unpacks_to_more_than_it_should_is_refused_before_it_is_read(
    version: str, tmp_path: Path
) -> None:
    """A row of 2^28 equal tokens is a file of 650 bytes, of which the footer may tell nothing."""
    path = tmp_path / "a.parquet"
    content = long_row(path, data_page_version=version)
    packed = pa.parquet.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size
    # The page says that it has 2^27 - 1 of them: twice the number, 7 bits a byte.
    path.write_bytes(content.replace(b"\x80\x80\x80\x01", b"\xfe\xff\xff\x7f", 1))

    with pytest.raises(Exception, match=r".") as caught:
        read([path], Options(Config(sequence_len=8)))

    assert type(caught.value).__name__ == "CliError"
    assert str(caught.value) == (
        f"{path}: row group 0 unpacks to 1,073,741,816 bytes from {packed}: write it with smaller "
        "row groups"
    )


def test_a_footer_that_says_more_than_there_is_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    content = long_row(path)
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:].replace(b"\x80\x80\x80\x01", b"\xfe\xff\xff\x7f")
    assert footer != content[start:]
    path.write_bytes(content[:start] + footer)

    with pytest.raises(Exception, match=r"no page of a column at byte ") as caught:
        read([path], Options(Config(sequence_len=8)))

    assert type(caught.value).__name__ == "CliError"


def test_a_list_in_the_header_of_a_page_is_no_longer_than_the_file(tmp_path: Path) -> None:
    """A field that no reader asks for, of 2^40 booleans, filled the memory."""
    path = tmp_path / "a.parquet"
    content = long_row(path)
    head = b"\x19\xf1" + b"\x80" * 5 + b"\x20"
    path.write_bytes(content[:4] + head + content[4 + len(head) :])

    said = limited(read_by(path), mebibytes=1024)

    assert said == [f"CliError: {path}: no page of a column at byte 4"]


def test_a_footer_that_contradicts_itself_does_not_end_the_process(tmp_path: Path) -> None:
    """Asked for a column of it, pyarrow 26 aborted."""
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"input_ids": [[1, 2], [3]]}), path)
    # Values that may be null, and then that may not, of which the statistics know nothing.
    content = path.read_bytes()
    assert content.count(b"\x25\x02\x18\x07element") == 1
    path.write_bytes(content.replace(b"\x25\x02\x18\x07element", b"\x25\x00\x18\x07element"))

    said = limited(read_by(path), mebibytes=1024)

    assert said == [
        f"CliError: {path}: Definition level histogram size mismatch, size: 4, expected: 3"
    ]


def read_by(path: Path) -> str:
    """The line that reads a file or a folder, for a process of its own."""
    sources = "__import__('multipack.cli.sources', fromlist=['read'])"
    return f"{sources}.read([Path({str(path)!r})], {sources}.Options(Config(sequence_len=8)))"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv"])
def test_two_columns_of_one_name_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    if name == "a.parquet":
        pa.parquet.write_table(table, path)
    elif name == "a.arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("text,body\na,b\n")

    with pytest.raises(Exception, match=r".") as caught:
        read([path], Options(Config(sequence_len=8), columns={"text": "body"}))

    assert type(caught.value).__name__ == "CliError"
    assert str(caught.value) == f"{path}: 2 columns are called `text`: keep one"


def compressed(path: Path, table: pa.Table, file: bool, unpacked: int) -> Path:
    """Write an Arrow file whose largest buffer says that it unpacks to 2^40 bytes."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with (pa.ipc.new_file if file else pa.ipc.new_stream)(
        str(path), table.schema, options=options
    ) as writer:
        writer.write_table(table)
    before, said, after = path.read_bytes().rpartition(unpacked.to_bytes(8, "little"))
    assert said
    path.write_bytes(before + (1 << 40).to_bytes(8, "little") + after)
    return path


def test_compressed_arrow_that_unpacks_to_more_than_it_should_is_refused_in_little_memory(
    tmp_path: Path,
) -> None:
    import datasets

    tokens = pa.table({"input_ids": [[7] * 100_001]})
    text = pa.table({"text": pa.array(["x" * 50_000, "y" * 50_001]).dictionary_encode()})
    paths = [
        compressed(tmp_path / "file.arrow", tokens, True, 800_008),
        compressed(tmp_path / "stream.arrow", tokens, False, 800_008),
        compressed(tmp_path / "dictionary.arrow", text, True, 100_001),
        tmp_path / "old.arrow",
        tmp_path / "folder",
    ]
    # As Arrow 0.17 told of compression.
    batch = pa.record_batch({"length": pa.array([1 << 40, 1], pa.int64())})
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(str(paths[3]), batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "zstd"})
    datasets.Dataset(tokens).save_to_disk(str(paths[4]))
    (data,) = paths[4].glob("*.arrow")
    compressed(data, tokens, False, 800_008)

    said = limited(*map(read_by, paths), mebibytes=1024)

    # The offsets of lists and texts are unpacked, too.
    unpacked = [8, 8, 12, 0, 8]
    assert [line.split(" bytes from ")[0] for line in said] == [
        f"CliError: {path}: record batch 0 unpacks to {(1 << 40) + more:,}"
        for path, more in zip([*paths[:4], data], unpacked, strict=True)
    ]
    assert all(line.endswith(": write it in smaller ones, or uncompressed") for line in said)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_may_still_be_compressed(compression: str, new: Any, tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1, 2, 3], [4]], "text": ["a", "b"]})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with new(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1)

    found, _ = read([tmp_path / "a.arrow"], Options(Config(sequence_len=8)))

    assert found.lengths.tolist() == [3, 1]


def test_long_rows_of_parquet_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """A thousand of them at once would take gigabytes."""
    path = tmp_path / "a.parquet"
    tokens = pa.array(np.zeros(6 << 20, np.int8))
    rows = pa.ListArray.from_arrays(np.arange(0, 7 << 20, 1 << 20, np.int32), tokens)
    pa.parquet.write_table(pa.table({"input_ids": rows}), path)

    batches = sources._read_table(path, Options(Config(sequence_len=8)))

    assert [batch.num_rows for batch in batches] == [4, 2]


def broken_lists(offsets: list[int]) -> pa.Table:
    """A table whose lists begin where no values are."""
    held = np.array([0, 1, 3], np.int32)
    lists = pa.ListArray.from_buffers(
        pa.list_(pa.int64()), 2, [None, pa.py_buffer(held)], children=[pa.array([1, 2, 3])]
    )
    table = pa.table({"input_ids": lists})
    held[:] = offsets  # only now, for pyarrow looks at them when it makes a table
    return table


@pytest.mark.parametrize(
    "offsets", [[0, 2, 2**30], [0, -5, 3], [3, 1, 3], [-(2**31), 1, 3]], ids=repr
)
def test_arrow_offsets_that_point_elsewhere_are_refused(offsets: list[int], tmp_path: Path) -> None:
    """Arrow follows them wherever they lead: into other memory, or to the end of the process."""
    import datasets

    from multipack import PackedDataset

    table = broken_lists(offsets)
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)

    with pytest.raises(Exception, match=r"a\.arrow: ") as caught:
        read([path], Options(Config(sequence_len=8)))
    assert type(caught.value).__name__ == "CliError"
    with pytest.raises(ValueError, match=r"^the data set's table is damaged: "):
        PackedDataset.from_arrow(
            # By itself it would read the table, to make a fingerprint.
            datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="damaged"),
            collator=Collator(sequence_len=8, attention="none"),
        )


def test_a_damaged_folder_is_refused_before_anything_is_gathered(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": [[1], [2, 3]]}).save_to_disk(str(tmp_path))
    (data,) = tmp_path.glob("*.arrow")
    offsets = np.array([0, 1, 3], np.int32).tobytes()
    damaged = np.array([0, 1, 2**30], np.int32).tobytes()
    assert offsets in data.read_bytes()
    data.write_bytes(data.read_bytes().replace(offsets, damaged))

    with pytest.raises(Exception, match=r" is damaged: ") as caught:
        read([tmp_path], Options(Config(sequence_len=8)))
    assert type(caught.value).__name__ == "CliError"


def test_a_batch_of_many_rows_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in slices, and looking at one of them takes as long as the whole batch."""
    table = pa.table({"input_ids": [[1, 2]] * 5000})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    looked_at = []
    real = sources._sound
    monkeypatch.setattr(sources, "_sound", lambda batch: looked_at.append(1) or real(batch))

    found, _ = read([path], Options(Config(sequence_len=8)))

    assert len(found.lengths) == 5000
    assert looked_at == [1]
