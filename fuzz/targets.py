"""What is fuzzed, and what must hold: see `run.py` for how.

Each target makes one case. It lets through only the errors that a caller is promised, of the right
class and with a sentence; everything else that is raised is a finding. Where an answer comes back
it is compared with a twin that does the same in the most obvious way: those of the tests.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import torch
import yaml
from by_hand import assert_batches_equal, reference_collate, reference_mask
from draw import Draw
from test_attention import compare, make, portable, run, run_alone

import multipack
from multipack import Collator, Config, MultipackBatchSampler, StreamingMultipack, ops
from multipack._plan_file import checksum
from multipack.cli import main
from multipack.cli._errors import CliError
from multipack.cli.sources import Options, read
from multipack.integrations import axolotl

TARGETS: dict[str, Callable[[Draw], None]] = {}
REFUSED = (ValueError, TypeError, IndexError)
DTYPES = [
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64),
    *(torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
]
KEYS = list(vars(Config()))
# Of each key, values that are allowed.
RIGHT: dict[str, list[Any]] = {
    "sequence_len": [1, 8, 32, 100],
    "micro_batch_size": [1, 2, 3, 4],
    "eval_batch_size": [None, 1, 2, 5],
    "gradient_accumulation_steps": [1, 2, 3],
    "world_size": [1, 2, 3],
    "sample_packing": [True, True, False],
    "batch_flattening": [False, False, True],
    "multipack_real_batches": [None, True, False],
    "sample_packing_algorithm": ["best_fit_decreasing", "first_fit", "next_fit", "tight"],
    "sample_packing_sequentially": [False, False, True],
    "sample_packing_bin_size": [None, None, 1, 3],
    "sample_packing_group_size": [None, None, 1, 7, 50],
    "balance_labels": [False, True],
    "label_balance_window_optim_steps": [1, 1, 2],
    "balance_cost": ["auto", "tokens", "padded", "attention"],
    "balance_cost_linear": [0.0, 1.0, 512.5],
    "excess_length_strategy": ["drop", "truncate", "raise"],
    "min_sample_len": [1, 1, 2, 9],
    "drop_unlabelled": [True, False],
    "incomplete_batches": ["drop", "split", "fill"],
    "pad_to_multiple_of": [1, 1, 4, 64],
    "pad_to_sequence_len": [False, True],
    "align_samples_to": [1, 1, 1, 4],
    "mask_first_label": [True, False],
    "padded_tail": ["own", "own", "last", "none"],
    "eval_sample_packing": [None, True, False],
    "streaming_multipack_buffer_size": [1, 3, 10_000],
    "seed": [0, 1, 2**64 - 1],
    "data_seed": [None, 0, 5],
}


def target(function: Callable[[Draw], None]) -> Callable[[Draw], None]:
    """List a target."""
    TARGETS[function.__name__] = function
    return function


class Finding(Exception):  # noqa: N818
    """Something that must not happen."""


@contextlib.contextmanager
def refusals(*classes: type[Exception]) -> Iterator[None]:
    """Let promised errors pass if their text is a sentence, and not a book."""
    promised = classes or REFUSED
    try:
        yield
    except promised as error:
        text = str(error)
        if not 0 < len(text) < 5000 or "internal error" in text:
            raise Finding(f"{type(error).__name__} of {len(text)} characters") from error


@contextlib.contextmanager
def short_of_memory() -> Iterator[None]:
    """Let torch's error for a tensor that is too large pass as well."""
    try:
        with refusals():
            yield
    except MemoryError:
        pass
    except RuntimeError as error:
        if not any(word in str(error) for word in ("memory", "calculation overflowed")):
            raise


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run without other threads, which must not change an answer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def settings(draw: Draw, share: float = 0.3) -> dict[str, Any]:
    """Some keys with values that are allowed, which may still exclude one another."""
    keys = {key: draw.one_of(values) for key, values in RIGHT.items() if draw.chance(share)}
    return {"sequence_len": 32, **keys}


# Settings.


@target
def config(draw: Draw) -> None:
    """Settings as JSON are refused by name, or accepted as what they say."""
    given = settings(draw)
    for _ in range(draw.randrange(4)):
        given[draw.one_of([*KEYS, draw.text()])] = draw.value()
    text = json.dumps(given)
    if draw.chance(0.2):
        text = draw.damaged(text.encode()).decode("utf-8", "replace")
    if draw.chance(0.02):
        text = draw.one_of(["[", '{"seed":', "-", "1"]) * draw.randint(1, 200_000)
    with refusals():
        resolved = ops.resolve_config(text)
        assert ops.resolve_config(resolved) == resolved
        made = Config(**json.loads(resolved))
        assert json.loads(made.to_json()) == json.loads(resolved)
        found = json.loads(text)
        for key, value in found.items():
            assert value is None or json.loads(resolved)[key] == value, key
    with refusals():
        Config(**given)


@target
def yaml_file(draw: Draw) -> None:
    """YAML settings, Axolotl's among them, are refused by name or read."""
    with folder() as path:
        file = path / "settings.yml"
        given = settings(draw)
        for _ in range(draw.randrange(3)):
            given[draw.one_of([*KEYS, *sorted(axolotl._USED), draw.text()])] = draw.value()
        content = yaml.safe_dump(given, allow_unicode=True).encode()
        if draw.chance(0.5):
            content = draw.damaged(content)
        if draw.chance(0.05):
            content += b"a: &a [x, x]\n" + b"".join(
                b"%c: &%c [*%c, *%c, *%c, *%c]\n" % (i + 1, i + 1, i, i, i, i)
                for i in range(ord("a"), ord("y"))
            )
            content += b"seed: *y\n"
        file.write_bytes(content)
        with refusals():
            Config.from_yaml(file)
        with refusals():
            axolotl.from_yaml(file)


# Plans.


def samples_for(draw: Draw, most: int = 40) -> tuple[list[int], list[int] | None, Any]:
    """Lengths, perhaps label counts, and perhaps which first labels count."""
    lengths = draw.sizes(draw.one_of([0, 1, 2, 5, 20, 90]), most)
    if draw.chance(0.4):
        return lengths, None, None
    starts = [draw.chance(0.5) and length > 0 for length in lengths]
    counts = [
        min(length, draw.randint(0, max(0, length - 1)) + int(start))
        for length, start in zip(lengths, starts, strict=True)
    ]
    counts = [c + 1 if s and not c else c for c, s in zip(counts, starts, strict=True)]
    return lengths, counts, starts if draw.chance(0.5) else None


@target
def plan(draw: Draw) -> None:
    """A plan keeps every promise, whatever the settings; wrong input is refused by name."""
    keys = settings(draw)
    most = 40
    if draw.chance(0.1):
        most = keys["sequence_len"] = draw.one_of([2**31 - 1, 2**30, 2**20])
    lengths, counts, starts = samples_for(draw, most)
    if draw.chance(0.2):
        at = draw.randrange(len(lengths) + 1)
        lengths[at:at] = [draw.integer() for _ in range(draw.randint(1, 3))]
        counts = starts = None
    if draw.chance(0.2):
        keys[draw.one_of(KEYS)] = draw.one_of([draw.integer(), 2**31 - 1, 2**30])
    if draw.chance(0.5):
        keys |= {"split": draw.one_of(["train", "eval"]), "epoch": draw.one_of([0, 1, 2**63 - 1])}
    with refusals():
        made = multipack.plan(lengths, counts, label_starts=starts, **keys)
        made.verify(lengths, counts, label_starts=starts)
        str(made.stats)
        ranks = min(made.config.world_size, 5)
        planned = [made[rank, k] for k in range(len(made)) for rank in range(ranks)]
        if ranks == made.config.world_size:
            assert sum(len(row) for rows in planned for row in rows) == len(made.index)
        with one_thread():
            assert multipack.plan(lengths, counts, label_starts=starts, **keys) == made


@target
def balance(draw: Draw) -> None:
    """Balancing moves whole samples, loses none, and makes no spread larger."""
    keys = {**settings(draw), "balance_labels": True}
    most = 40
    if draw.chance(0.1):
        most = keys["sequence_len"] = draw.one_of([2**31 - 1, 2**30, 2**20])
    lengths, counts, starts = samples_for(draw, most)
    with refusals():
        made = multipack.plan(lengths, counts, label_starts=starts, **keys)
        made.verify(lengths, counts, label_starts=starts)
        before, after = made.stats.before, made.stats.after
        assert before.rows == after.rows
        for name in ("microbatch_label_std", "step_label_std"):
            spread, was = getattr(after, name), getattr(before, name)
            if was is not None:
                assert spread <= was * (1 + 1e-9) + 1e-9, (name, was, spread)


# Batches.


def rows_for(draw: Draw, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of samples, some of which may come several times."""
    sizes = [draw.randint(1, 5) for _ in range(draw.randint(0, 3) if samples else 0)]
    index = [draw.randrange(samples) for _ in range(sum(sizes))]
    borders = torch.from_numpy(np.cumsum([0, *sizes]))
    return torch.tensor(index, dtype=torch.int64), borders


def shuffled(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """The same values somewhere else in memory."""
    kind = draw.randrange(5)
    if kind == 0:
        return torch.stack([tensor, tensor + 1], dim=1)[:, 0]
    if kind == 1:
        return torch.cat([tensor.new_full((3,), 99), tensor])[3:]
    if kind == 2 and tensor.numel():
        raw = bytearray(1) + bytearray(tensor.numpy().tobytes())
        return torch.frombuffer(raw, dtype=tensor.dtype, offset=1)
    return tensor


def collate_options(draw: Draw) -> dict[str, Any]:
    """Options of collate that may be right."""
    options: dict[str, Any] = {
        "row_len": draw.one_of([0, 0, 0, 64, 100, 256]),
        "max_sample_len": draw.one_of([0, 0, 1, 3, 8, 17]),
        "pad_to_multiple_of": draw.one_of([1, 1, 8, 10]),
        "align_samples_to": draw.one_of([1, 1, 2, 4, 16]),
        "pad_token_id": draw.one_of([0, 2, -1]),
        "position_start": draw.one_of([0, 0, 2]),
        "mask_first_label": draw.chance(0.7),
        "padded_tail": draw.one_of(["own", "own", "last", "none"]),
        "causal": draw.chance(0.7),
        "window": draw.one_of([None, None, 1, 5, 2**62]),
        "attention_mask": draw.one_of(["none", "none", "bool", "additive"]),
    }
    if options["attention_mask"] == "additive":
        options["mask_dtype"] = draw.one_of([None, torch.float32, torch.bfloat16, torch.float16])
    return options


@target
def collate(draw: Draw) -> None:
    """Batches are those of the twin that lays one token after the other."""
    lengths = draw.sizes(draw.randint(0, 8), 20)
    before = draw.one_of([0, 0, 3])
    total = before + sum(lengths) + draw.one_of([0, 0, 2])
    dtype = draw.one_of([torch.int64, torch.int32])
    tokens = torch.tensor([draw.randint(0, 99) for _ in range(total)], dtype=dtype)
    offsets = torch.from_numpy(np.cumsum([before, *lengths]))
    index, row_offsets = rows_for(draw, len(lengths))
    options = collate_options(draw)
    if draw.chance(0.5):
        values = [draw.one_of([-100, 1, 2]) for _ in range(total)]
        options["labels"] = torch.tensor(values, dtype=draw.one_of([torch.int64, torch.int32]))
    narrow = draw.one_of([torch.int64, torch.int32, torch.int16])
    arguments = [
        shuffled(draw, tokens),
        shuffled(draw, offsets.to(narrow)),
        shuffled(draw, index.to(narrow)),
        shuffled(draw, row_offsets.to(narrow)),
    ]
    with refusals(ValueError):
        found = ops.Batch(*torch.ops.multipack.collate(*arguments, **options))
        expected = reference_collate(tokens, offsets, index, row_offsets, **options)
        assert_batches_equal(expected, found)
        values = (tokens * 3 + 1).to(draw.one_of([torch.int16, torch.float32, torch.float64]))
        shape = {
            key: options[key]
            for key in ("row_len", "max_sample_len", "pad_to_multiple_of", "align_samples_to")
        }
        packed = torch.ops.multipack.pack_values(values, *arguments[1:], pad=-1, **shape)
        real = expected.segment_ids > 0
        assert packed.shape == expected.input_ids.shape
        assert torch.equal(packed[real], (expected.input_ids[real] * 3 + 1).to(packed.dtype))
        assert bool((packed[~real] == -1).all())


def any_tensor(draw: Draw) -> torch.Tensor:
    """A tensor of any dtype, shape, stride and contents, on the CPU or nowhere."""
    shape = [draw.randint(0, 4) for _ in range(draw.one_of([0, 1, 1, 1, 2, 3]))]
    dtype = draw.one_of(DTYPES[:2] if draw.chance(0.6) else DTYPES)
    count = math.prod(shape)
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.tensor([draw.uniform(-9, 9) for _ in range(count)], dtype=torch.float64)
    else:
        made = torch.tensor([draw.integer() % 2**63 for _ in range(count)], dtype=torch.int64)
        if draw.chance(0.7):
            made = torch.tensor(sorted(draw.randint(-1, 9) for _ in range(count)))
    made = made.to(dtype).reshape(shape)
    kind = draw.randrange(12)
    if kind == 0:
        return made.to("meta")
    if kind == 1 and made.dim() == 2:
        return made.t()
    if kind == 2 and made.dim():
        return made[:1].expand(draw.randint(0, 5), *made.shape[1:]) if len(made) else made
    if kind == 5 and made.numel() == 1:
        return made.flatten().expand(draw.one_of([2**20, 2**31, 2**40, 2**62]))
    if kind == 6:
        return made.new_empty(draw.one_of([(2**40, 0), (0, 2**40), (2**62, 0)]))
    if kind == 3 and made.dim() and dtype in (torch.float32, torch.int64):
        return made.to_sparse()
    if kind == 4 and made.dtype == torch.complex64:
        return made.conj()
    return made


@target
def refusal(draw: Draw) -> None:
    """The ops with any tensors and numbers: an answer or a sentence, never a crash."""
    ints = [draw.int64() for _ in range(8)]
    tensors = [any_tensor(draw) for _ in range(6)]
    call = torch.ops.multipack
    options: dict[str, Any] = collate_options(draw)
    for _ in range(draw.randrange(3)):
        key = draw.one_of(["row_len", "max_sample_len", "pad_to_multiple_of", "align_samples_to"])
        options[key] = ints[0]
    if draw.chance(0.3):
        key = draw.one_of(["window", "position_start", "pad_token_id"])
        options[key] = ints[1]
    if draw.chance(0.1):
        options["mask_dtype"] = draw.one_of(DTYPES)
    if draw.chance(0.1):
        options[draw.one_of(["attention_mask", "padded_tail"])] = draw.text()
    shape = {k: v for k, v in options.items() if k.endswith(("_len", "_of", "_to"))}
    places = torch.tensor([0, 2])
    right = (torch.arange(9), torch.tensor([0, 3, 3, 9]), places, places)
    arguments = [t if draw.chance(0.4) else r for t, r in zip(tensors, right, strict=False)]
    labels, some = draw.one_of([None, None, tensors[4]]), draw.one_of([None, tensors[2:4]])
    pad = draw.one_of([0, -1, 2.5, 1e300, ints[2]])
    calls: list[Callable[[], Any]] = [
        lambda: call.collate(*arguments, labels=labels, **options),
        lambda: call.collate_list(tensors[:2], arguments[3], labels=some, **options),
        lambda: call.pack_values(*arguments, pad=pad, **shape),
        lambda: call.block_mask(
            tensors[0], window=draw.one_of([None, ints[3]]), dtype=draw.one_of([None, *DTYPES])
        ),
        lambda: call.boundaries(tensors[0]),
        lambda: call.label_counts(tensors[0], tensors[1], max_sample_len=draw.one_of([0, ints[4]])),
        lambda: call.plan(
            tensors[0],
            draw.one_of([None, tensors[1]]),
            draw.one_of([None, tensors[2]]),
            json.dumps(settings(draw)),
            ints[5],
            draw.chance(0.5),
        ),
        lambda: call.microbatch(*tensors[:3], *ints[:3]),
        lambda: call.microbatch(*tensors[:3], 1, 0, draw.randrange(3)),
    ]
    with short_of_memory():
        draw.one_of(calls)()


@target
def mask(draw: Draw) -> None:
    """Masks and borders are those of a look at every pair and every place."""
    rows, row_len = draw.randint(0, 3), draw.randint(0, 40)
    ids = torch.tensor(
        [[draw.randint(0, 4) for _ in range(row_len)] for _ in range(rows)], dtype=torch.int64
    ).reshape(rows, row_len)
    if draw.chance(0.5):
        ids = ids.sort(dim=1).values
    ids = ids.to(draw.one_of([torch.int64, torch.int32, torch.int8]))
    causal, window = draw.chance(0.5), draw.one_of([None, 1, 3, 100, 2**62])
    dtype = draw.one_of([torch.bool, torch.float32, torch.bfloat16, torch.float16])
    found = multipack.block_mask(ids, causal=causal, window=window, dtype=dtype)
    assert torch.equal(found, reference_mask(ids, causal, window, dtype))

    start = draw.randint(0, 2)
    borders, positions = [0], []
    for _ in range(rows):
        left = row_len
        while left > 0:
            length = draw.randint(1, left)
            positions += range(start, start + length)
            borders.append(borders[-1] + length)
            left -= length
    places = torch.tensor(positions, dtype=torch.int64).reshape(rows, row_len)
    assert multipack.boundaries(places).tolist() == borders


# Attention.


@target
def attention(draw: Draw) -> None:
    """Attention and its gradients are those of each segment alone; any other input is refused."""
    if draw.chance(0.5):
        strange_attention(draw)
        return
    lengths = draw.sizes(draw.randint(0, 6), draw.one_of([4, 20, 90]))
    borders = torch.tensor(np.cumsum([0, *lengths]), dtype=draw.one_of([torch.int32, torch.int64]))
    kv_heads, group, size = draw.randint(1, 3), draw.randint(1, 3), draw.one_of([1, 3, 8, 16, 33])
    dtype = draw.one_of([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    tokens = int(borders[-1]) + draw.one_of([0, 0, 3])
    inputs = make(tokens, kv_heads * group, kv_heads, size, dtype, seed=draw.randrange(1 << 30))
    look: dict[str, Any] = {"causal": draw.chance(0.6)}
    if draw.chance(0.5):
        look["window"] = draw.randint(1, 60)
    if draw.chance(0.3):
        look["scale"] = draw.uniform(0, 2)
    longest = max(lengths, default=0)
    found = run(inputs, borders, **look, max_seqlen=draw.one_of([None, longest, longest + 5]))
    if longest:
        compare(found, run_alone(inputs, borders, **look), tolerance)
    if draw.chance(0.3):
        compare(portable(inputs, borders, **look), found, tolerance)
    with one_thread():
        single = run(inputs, borders, **look)
    compare(single, found, tolerance)


def strange_attention(draw: Draw) -> None:
    """Call attention with anything."""
    tokens, heads, size = draw.randint(0, 9), draw.randint(0, 4), draw.randint(0, 5)
    dtype = draw.one_of([torch.float32, torch.float64, torch.bfloat16, *DTYPES])

    def tensor(heads: int) -> torch.Tensor:
        if draw.chance(0.1):
            return any_tensor(draw)
        made = torch.randn(size, heads, tokens).permute(2, 1, 0)
        made = made if draw.chance(0.3) else made.contiguous()
        made = made.to(draw.one_of(DTYPES) if draw.chance(0.05) else dtype)
        return made.requires_grad_(made.is_floating_point() and draw.chance(0.5))

    kv_heads = draw.one_of([heads, 1, draw.randint(0, 3)])
    q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
    if draw.chance(0.1) and q.dim() and q.layout == torch.strided:
        q = q.detach()[..., ::2].requires_grad_(q.is_floating_point())
    borders = any_tensor(draw)
    if draw.chance(0.6):
        numbers = [0, *(draw.randint(-1, tokens + 1) for _ in range(draw.randint(0, 4)))]
        if draw.chance(0.7):
            numbers = sorted(abs(n) for n in numbers)
        borders = torch.tensor(numbers, dtype=draw.one_of([torch.int32, torch.int64]))
    with short_of_memory():
        out = multipack.attention(
            *(q, k, v, borders),
            max_seqlen=draw.one_of([None, None, draw.int64()]),
            causal=draw.chance(0.5),
            window=draw.one_of([None, None, draw.int64()]),
            scale=draw.one_of([None, None, 0.0, float("nan"), float("inf"), -1e300]),
            dropout_p=draw.one_of([0.0, 0.0, 0.5, 1.0, -1.0, float("nan")]),
        )
        assert out.shape == q.shape
        if out.requires_grad:
            out.sum().backward()
        elif out.device.type == "cpu":
            # Every argument is there: none was left out of the look at devices.
            assert {tensor.device.type for tensor in (q, k, v, borders)} == {"cpu"}


# States.


@target
def state(draw: Draw) -> None:
    """A damaged state is refused and changes nothing, or is followed without a crash."""
    lengths = draw.sizes(draw.randint(1, 30), 40)
    keys = settings(draw)
    keys |= {"world_size": 1, "label_balance_window_optim_steps": 1}
    with refusals():
        sampler = MultipackBatchSampler(lengths, **keys)
        batches = iter(sampler)
        for _ in range(draw.randint(0, 3)):
            next(batches, None)
        saved = json.loads(json.dumps(sampler.state_dict()))
        damaged = draw.changed(saved) if draw.chance(0.9) else draw.value()
        fresh = MultipackBatchSampler(lengths, **keys)
        before = fresh.state_dict()
        try:
            fresh.load_state_dict(damaged, ignore_data_skip=draw.chance(0.1))
        except REFUSED:
            assert fresh.state_dict() == before
            raise
        for _ in zip(range(3), fresh, strict=False):
            pass
        fresh.state_dict()


@target
def stream(draw: Draw) -> None:
    """The same of a stream, whose states hold samples."""
    keys = settings(draw)
    keys |= {
        "world_size": 1,
        "label_balance_window_optim_steps": 1,
        "streaming_multipack_buffer_size": draw.one_of([1, 3, 5]),
    }
    tokens = [[draw.randint(0, 99) for _ in range(n)] for n in draw.sizes(12, 40)]
    names = draw.one_of([["input_ids"], ["input_ids", "labels"]])
    samples = [dict.fromkeys(names, ids) for ids in tokens]
    with refusals():
        collator = Collator(Config(**keys), attention="none")
        made = StreamingMultipack(samples, collator=collator)
        batches = iter(made)
        for _ in range(draw.randint(0, 4)):
            next(batches, None)
        saved = json.loads(json.dumps(made.state_dict()))
        damaged = draw.changed(saved) if draw.chance(0.95) else draw.value()
        fresh = StreamingMultipack(samples, collator=collator)
        before = copy.deepcopy(fresh.state_dict())
        try:
            fresh.load_state_dict(damaged)
        except REFUSED:
            assert fresh.state_dict() == before
            raise
        for _ in zip(range(20), fresh, strict=False):
            pass
        fresh.state_dict()


# Files.


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for one case."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@target
def plan_file(draw: Draw) -> None:
    """A damaged plan is refused when it is read, even if its checksum was made to fit."""
    lengths, counts, starts = samples_for(draw)
    with refusals(), folder() as path:
        made = multipack.plan(lengths, counts, label_starts=starts, **settings(draw))
        file, other, numbers = path / "a.plan", path / "b.plan", path / "lengths.json"
        made.save(file)
        made.save(other)
        numbers.write_text(json.dumps(lengths))
        if draw.chance(0.4):
            file.write_bytes(draw.damaged(file.read_bytes()))
        else:
            rewrite_plan(draw, file)
        read_back = multipack.load_plan(file)
        for command in (
            ["verify", str(file), str(numbers)],
            ["show", str(file), str(numbers), "--microbatch", str(draw.randrange(3))],
            ["diff", str(file), str(other)],
        ):
            with silence():
                assert main(["plan", *command]) in (0, 1, 2)
        with refusals():
            for k in range(min(3, len(read_back))):
                read_back[0, k]
        with refusals():
            read_back.verify(lengths, counts, label_starts=starts)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what a command prints to itself."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def rewrite_plan(draw: Draw, file: Path) -> None:
    """Change what a plan says, and make the checksum fit."""
    with np.load(file) as archive:
        arrays = {name: archive[name] for name in ("index", "row_offsets", "batch_offsets")}
        header = json.loads(archive["header"].tobytes())
    if draw.chance(0.7):
        header = draw.changed(header)
    if draw.chance(0.5):
        name = draw.one_of(list(arrays))
        array = arrays[name].copy()
        kind = draw.randrange(5)
        if kind == 0 and len(array):
            array[draw.randrange(len(array))] = draw.int64()
        elif kind == 1:
            array = array[: draw.randint(0, len(array))]
        elif kind == 2:
            array = array.astype(draw.one_of(["float64", "int32", "uint64", "S3", "bool"]))
        elif kind == 3:
            array = array.reshape(-1, 1)
        elif kind == 4:
            array = array[::-1]
        arrays[name] = array
    text = json.dumps(header).encode()
    if draw.chance(0.1):
        text = draw.damaged(text)
    write = np.savez_compressed if draw.chance(0.1) else np.savez
    with file.open("wb") as opened:
        write(
            opened,
            header=np.frombuffer(text, np.uint8),
            checksum=np.frombuffer(checksum(text, arrays), np.uint8),
            **arrays,
        )


def read_by_report(draw: Draw, file: Path) -> None:
    """Read a file as `multipack report` does."""
    options = Options(Config(sequence_len=32), skip_bad=draw.chance(0.5))
    with contextlib.suppress(MemoryError), silence(), refusals(CliError):
        read([file], options)


@target
def records(draw: Draw) -> None:
    """Damaged lines, JSON, tables of text and NumPy files are read or refused in a sentence."""
    kind = draw.one_of(["jsonl", "json", "csv", "npy", "npz", "txt"])
    lengths = draw.sizes(draw.randint(0, 9), 30)
    rows: list[Any] = [
        draw.one_of(
            [
                {"input_ids": list(range(n)), "labels": [-100] * n},
                {"length": n, "label_count": n // 2, "count": draw.one_of([1, 2, draw.integer()])},
                {"input_ids": list(range(n))},
                n,
            ]
        )
        for n in lengths
    ]
    rows = [draw.changed(row) if draw.chance(0.1) else row for row in rows]
    with folder() as path:
        file = path / f"data.{kind}"
        if kind in ("jsonl", "txt"):
            file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
        elif kind == "json":
            data: Any = rows
            if draw.chance(0.3):
                data = {str(n): draw.one_of([1, draw.integer()]) for n in lengths}
            file.write_text(json.dumps(data))
        elif kind == "csv":
            lines = ["length,label_count,count", *(f"{n},{n},{draw.integer()}" for n in lengths)]
            file.write_text("\n".join(lines))
        else:
            dtype = draw.one_of(["int64", "uint8", "int32", "uint64", "float32"])
            array = np.array([abs(draw.integer()) % 2**63 for _ in lengths], "u8").astype(dtype)
            if kind == "npy":
                np.save(file, array)
            else:
                write = draw.one_of([np.savez, np.savez_compressed])
                write(file, lengths=array, label_counts=array, count=array)
        if draw.chance(0.6):
            file.write_bytes(draw.damaged(file.read_bytes()))
        read_by_report(draw, file)


@target
def arrow(draw: Draw) -> None:
    """Damaged Parquet and Arrow files are read or refused in a sentence."""
    kind = draw.one_of(["parquet", "file", "stream"])
    lengths = draw.sizes(draw.randint(0, 9), 30)
    width, kind_of_value = draw.one_of(
        [
            *((pa.int32(), int), (pa.int64(), int), (pa.int8(), int), (pa.uint64(), int)),
            *((pa.string(), str), (pa.bool_(), bool)),
        ]
    )
    values = [[kind_of_value(i % 2) for i in range(n)] for n in lengths]
    listed = draw.one_of([pa.list_, pa.large_list])(width)
    columns: dict[str, Any] = {"input_ids": pa.array(values, listed)}
    if draw.chance(0.5):
        columns["labels"] = columns["input_ids"]
    if draw.chance(0.2):
        columns["attention_mask"] = pa.array([[1] * n for n in lengths], pa.list_(pa.int8()))
    if draw.chance(0.2):
        columns = {"length": pa.array(lengths, draw.one_of([pa.int64(), pa.uint8()]))}
    if draw.chance(0.1):
        columns = {"text": pa.array(["x" * n for n in lengths])}
    table = pa.table(columns)
    if draw.chance(0.3):
        table = table.slice(draw.randint(0, len(lengths)))
    with folder() as path:
        file = path / ("data.parquet" if kind == "parquet" else "data.arrow")
        if kind == "parquet":
            pages, packed = draw.one_of(["1.0", "2.0"]), draw.one_of(["none", "snappy", "zstd"])
            pa.parquet.write_table(table, file, data_page_version=pages, compression=packed)
        else:
            new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
            options = pa.ipc.IpcWriteOptions(compression=draw.one_of([None, "lz4", "zstd"]))
            with new(str(file), table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=4)
        if draw.chance(0.8):
            file.write_bytes(draw.damaged(file.read_bytes()))
        read_by_report(draw, file)
