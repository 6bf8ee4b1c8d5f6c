"""Loading the library: what is registered, and what is said when it cannot be loaded.

Most of this needs a process of its own, because a library can be loaded but not unloaded.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

import multipack

SCHEMAS = """
multipack::resolve_config(str config) -> str
multipack::plan(Tensor lengths, Tensor? label_counts, Tensor? label_starts, str config, \
int epoch=0, bool evaluation=False) -> (Tensor index, Tensor row_offsets, Tensor batch_offsets, \
Tensor report)
multipack::microbatch(Tensor index, Tensor row_offsets, Tensor batch_offsets, int world_size, \
int rank, int k) -> (Tensor index, Tensor row_offsets)
multipack::label_counts(Tensor labels, Tensor offsets, *, int max_sample_len=0, \
bool mask_first_label=True) -> (Tensor counts, Tensor starts)
multipack::collate(Tensor tokens, Tensor offsets, Tensor index, Tensor row_offsets, *, \
Tensor? labels=None, SymInt row_len=0, int max_sample_len=0, int pad_to_multiple_of=1, \
int align_samples_to=1, int pad_token_id=0, int position_start=0, bool mask_first_label=True, \
str padded_tail="own", str attention_mask="none", bool causal=True, int? window=None, \
ScalarType? mask_dtype=None) -> (Tensor input_ids, Tensor labels, Tensor position_ids, \
Tensor segment_ids, Tensor cu_seqlens, Tensor cu_seqlens_padded, Tensor max_seqlen, \
Tensor attention_mask)
multipack::collate_list(Tensor[] input_ids, Tensor row_offsets, *, Tensor[]? labels=None, \
SymInt row_len=0, int max_sample_len=0, int pad_to_multiple_of=1, int align_samples_to=1, \
int pad_token_id=0, int position_start=0, bool mask_first_label=True, str padded_tail="own", \
str attention_mask="none", bool causal=True, int? window=None, ScalarType? mask_dtype=None) -> \
(Tensor input_ids, Tensor labels, Tensor position_ids, Tensor segment_ids, Tensor cu_seqlens, \
Tensor cu_seqlens_padded, Tensor max_seqlen, Tensor attention_mask)
multipack::pack_values(Tensor values, Tensor offsets, Tensor index, Tensor row_offsets, *, \
SymInt row_len=0, int max_sample_len=0, int pad_to_multiple_of=1, int align_samples_to=1, \
Scalar pad=0) -> Tensor
multipack::block_mask(Tensor segment_ids, *, bool causal=True, int? window=None, \
ScalarType? dtype=None) -> Tensor
multipack::boundaries(Tensor position_ids) -> Tensor
multipack::attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, *, SymInt? max_seqlen=None, \
bool causal=True, int? window=None, float? scale=None, float dropout_p=0.) -> Tensor
multipack::_attention_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, \
SymInt? max_seqlen, bool causal, int? window, float? scale, float dropout_p) -> (Tensor out, \
Tensor logsumexp, Tensor random)
multipack::_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, \
Tensor logsumexp, Tensor random, Tensor cu_seqlens, SymInt? max_seqlen, bool causal, int? window, \
float? scale, float dropout_p) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)
"""

COLLATE = """
print(torch.ops.multipack.boundaries(torch.tensor([0, 1, 0])).tolist())
"""


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def import_error(**variables: str) -> str:
    """Return the sentence with which the import fails."""
    code = """
try:
    import multipack
except ImportError as error:
    print(error)
"""
    done = run(code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("schema", SCHEMAS.strip().splitlines())
def test_schemas_are_the_published_ones(schema):
    name = schema.split("(")[0]

    assert str(torch._C._get_schema(name, "")) == schema


def test_no_op_is_registered_without_being_published():
    ours = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("multipack::")}

    assert ours == {schema.split("(")[0] for schema in SCHEMAS.strip().splitlines()}


def test_library_path_is_the_file_that_is_loaded():
    assert Path(multipack.library_path).is_file()
    assert str(multipack.library_path) in Path("/proc/self/maps").read_text()


def test_another_torch_is_refused_with_both_versions(tmp_path):
    library = tmp_path / "libmultipack.so"
    shutil.copy(multipack.library_path, library)
    library.with_suffix(".json").write_text(json.dumps({"torch": "2.11.1+cpu"}))

    said = import_error(MULTIPACK_LIBRARY=str(library))

    assert said == (
        f"multipack's library {library} was built for torch 2.11.1+cpu, but this is torch "
        f"{torch.__version__}: install torch 2.11, or build multipack again for this torch with "
        "'pip install --no-build-isolation .' in the folder of its sources"
    )


def test_a_missing_library_is_named(tmp_path):
    said = import_error(MULTIPACK_LIBRARY=str(tmp_path / "none.so"))

    assert said == (
        f"multipack's library is missing: there is no file {tmp_path}/none.so; install multipack "
        "with 'pip install --no-build-isolation .' in its folder, or set MULTIPACK_LIBRARY to the "
        "library"
    )


def test_a_library_that_does_not_load_says_why(tmp_path):
    library = tmp_path / "broken.so"
    library.write_bytes(b"no library")

    said = import_error(MULTIPACK_LIBRARY=str(library))

    assert said == (
        f"multipack's library {library} does not load: {library}: file too short; build it again "
        f"for torch {torch.__version__} with 'pip install --no-build-isolation .' in the folder of "
        "its sources"
    )


def test_a_library_without_a_record_finds_out_itself(tmp_path, another_torch):
    library = tmp_path / "libmultipack.so"
    shutil.copy(multipack.library_path, library)

    said = import_error(MULTIPACK_LIBRARY=str(library), **another_torch)

    assert said == (
        f"multipack's library {library} was not built for torch {torch.__version__}: build it "
        "again with 'pip install --no-build-isolation .' in the folder of its sources"
    )


def test_loading_again_or_a_copy_changes_nothing(tmp_path):
    """A second registration would throw inside a static initialiser and end the process."""
    copy = tmp_path / "copy.so"
    shutil.copy(multipack.library_path, copy)
    code = f"""
import torch
torch.ops.load_library({str(multipack.library_path)!r})
torch.ops.load_library({str(multipack.library_path)!r})
torch.ops.load_library({str(copy)!r})
import multipack
torch.ops.load_library({str(copy)!r})
{COLLATE}
"""
    done = run(code)

    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 2, 3]\n", "")


def test_without_the_package_the_library_alone_refuses_other_devices():
    code = f"""
import torch
torch.ops.load_library({str(multipack.library_path)!r})
try:
    torch.ops.multipack.boundaries(torch.zeros(3, dtype=torch.int64, device="meta"))
except ValueError as error:
    print(error)
"""
    done = run(code)

    assert (done.returncode, done.stdout) == (
        0,
        "multipack::boundaries runs on the CPU, but position_ids is on meta: "
        "move it there with .cpu(), and the results back\n",
    )


@pytest.mark.parametrize(("threads", "fits"), [("2", True), ("0", False), ("many", False)])
def test_the_thread_variable_is_checked(threads, fits):
    code = """
import torch
import multipack
tokens = torch.arange(5)
one = torch.tensor([0, 5])
try:
    batch = multipack.ops.collate(tokens, one, torch.tensor([0]), torch.tensor([0, 1]))
    print(batch.input_ids.shape[1])
except ValueError as error:
    print(error)
"""
    done = run(code, MULTIPACK_NUM_THREADS=threads)

    complaint = (
        f"the environment variable MULTIPACK_NUM_THREADS is '{threads}', "
        "but must be a positive integer"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "5" if fits else complaint)


def copied(tmp_path: Path, change: Callable[[bytes], bytes]) -> Path:
    """Write a changed copy of the library, without a record of its torch."""
    library = tmp_path / "changed.so"
    library.write_bytes(change(Path(multipack.library_path).read_bytes()))
    return library


def test_a_library_that_was_cut_off_is_refused_before_it_ends_the_process(tmp_path):
    """Linux maps such a file, and sends SIGBUS at the first page that is not there."""
    whole = Path(multipack.library_path).stat().st_size

    for size in (100, 4096, whole // 2, whole - 1):
        library = copied(tmp_path, lambda content, size=size: content[:size])

        said = import_error(MULTIPACK_LIBRARY=str(library))

        assert said == (
            f"multipack's library {library} is damaged: it has {size} bytes, but its header says "
            f"{whole}; build it again for torch {torch.__version__} with "
            "'pip install --no-build-isolation .' in the folder of its sources"
        )


def test_a_library_for_another_processor_is_refused(tmp_path):
    """The system says of it that there is no such file."""
    for at, number in ((18, 183), (4, 1)):  # aarch64; 32 bits
        library = copied(
            tmp_path,
            lambda content, at=at, number=number: (
                content[:at] + bytes([number]) + content[at + 1 :]
            ),
        )

        assert import_error(MULTIPACK_LIBRARY=str(library)).startswith(
            f"multipack's library {library} is damaged: it is for another processor than this "
            "Python; build it again"
        )


def test_a_library_of_another_release_is_refused_with_both_versions(tmp_path):
    ours = metadata.version("multipack").split("+")[0]
    known = f"{ours}\0".encode()
    at = Path(multipack.library_path).read_bytes().index(known)
    other = "9" + ours[1:]
    library = copied(
        tmp_path, lambda content: content[:at] + other.encode() + content[at + len(ours) :]
    )

    assert import_error(MULTIPACK_LIBRARY=str(library)) == (
        f"multipack's library {library} is of version {other}, but the package is {ours}: build it "
        "again with 'pip install --no-build-isolation .' in the folder of its sources, or unset "
        "MULTIPACK_LIBRARY"
    )


def test_a_library_that_cannot_tell_its_version_is_an_older_one(tmp_path):
    library = copied(
        tmp_path, lambda content: content.replace(b"multipack_version\0", b"multipack_verzion\0")
    )

    assert import_error(MULTIPACK_LIBRARY=str(library)).startswith(
        f"multipack's library {library} is older than the package, which is "
    )


def test_a_library_that_lacks_an_op_names_it():
    """As an earlier build of the same version does."""
    code = """
from pathlib import Path
from multipack import _library
_library._OPS += ("unpack",)
try:
    _library.load(Path(_library.library_path))
except ImportError as error:
    print(error)
"""
    done = run(code)

    assert "lacks the ops unpack: build it again with 'pip install" in done.stdout


def test_a_library_with_an_unknown_symbol_says_which(tmp_path):
    """Built for another torch, and no record beside it that would tell."""
    library = copied(
        tmp_path, lambda content: content.replace(b"_ZN3c1010Dispatcher", b"_ZN3c1010Dispatched")
    )

    said = import_error(MULTIPACK_LIBRARY=str(library))

    assert said.startswith(f"multipack's library {library} does not load: ")
    assert "undefined symbol: _ZN3c1010Dispatched" in said


@pytest.mark.parametrize("record", ["", "{}", "[1]", "null", '{"torch": '])
def test_a_record_that_says_nothing_is_an_import_error(record, tmp_path):
    library = copied(tmp_path, lambda content: content)
    library.with_suffix(".json").write_text(record)

    assert import_error(MULTIPACK_LIBRARY=str(library)).startswith(
        f"{library.with_suffix('.json')} does not say which torch multipack's library was built for"
    )


def test_the_library_may_be_named_by_a_relative_path(monkeypatch):
    library = Path(multipack.library_path)
    monkeypatch.chdir(library.parent)

    done = run("import multipack", MULTIPACK_LIBRARY=library.name)

    assert (done.returncode, done.stderr) == (0, "")
