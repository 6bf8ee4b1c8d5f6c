"""From samples to the tensors that a model takes.

A `Collator` joins the samples of a microbatch end to end, one NumPy pass for each key, and hands
them to ``torch.ops.multipack.collate``, which lays them into rows and makes positions, labels,
boundaries and the mask in one more. Arrays and tensors cost one or two microseconds for each sample
and key. Python lists are the slow path: 30 ns for each token and key, nearly all of it spent on
taking ints apart. `multipack.PackedDataset` avoids both by reading flat buffers.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import pad

from multipack import ops
from multipack._arrays import integer
from multipack._config import Config, Split, capacity, checked_split, layout, make_config
from multipack._flex import flex_block_mask
from multipack._for_model import MASK_DTYPES, choose
from multipack._microbatch import Microbatch, Terms
from multipack._samples import Sample, Samples
from multipack._transport import sendable

IGNORED_LABEL = -100

# How the consumers that read boundaries call them, and the longest segment; of queries, of keys.
_BOUNDARIES = {
    "flash": ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k"),
    "multipack": ("cu_seq_lens_q", "max_length_q", "cu_seq_lens_k", "max_length_k"),
    "varlen": ("cu_seq_q", "max_q", "cu_seq_k", "max_k"),
}
_MASKS = ("bool", "additive")
_ATTENTION = ("none", *_MASKS, "flash", "varlen", "flex", "multipack")
_BORDERS = ("cu_seqlens", "cu_seqlens_padded")
_ROW = (list, tuple)
# What the op takes an option to be that it is not given.
_DEFAULTS = {
    argument.name: argument.default_value
    for argument in torch.ops.multipack.collate.default._schema.arguments
}
_OUTPUTS = (*_BORDERS, "max_seqlen", "segment_ids", "seq_idx", "shift_labels")


class Collator:
    """Makes a batch of samples, or of rows of samples, into a dict of tensors.

    For samples of 3 and 2 tokens in one row, with ``attention="flash"`` and
    ``pad_to_multiple_of=8``:

        >>> batch = Collator(attention="flash", pad_to_multiple_of=8)(
        ...     [{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}]
        ... )
        >>> batch["input_ids"]
        tensor([[11, 12, 13, 21, 22,  0,  0,  0]])
        >>> batch["labels"]
        tensor([[-100,   12,   13, -100,   22, -100, -100, -100]])
        >>> batch["position_ids"]
        tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
        >>> batch["cu_seq_lens_q"], batch["max_length_q"]
        (tensor([0, 3, 5, 8], dtype=torch.int32), 3)

    Args:
        config (Config): The settings: how samples lie in a batch, padding, alignment, truncation,
            the first label.
        attention (str): How the samples of a row are kept apart. There is no default, because the
            wrong one lets samples see each other and nothing fails:

            - ``"flash"``: `cu_seq_lens_q`, `cu_seq_lens_k` (int32 (S+1,)), `max_length_q`,
              `max_length_k` (int), as transformers' flash attention takes them;
            - ``"multipack"``: the same, for ``attn_implementation="multipack"``;
            - ``"varlen"``: `cu_seq_q`, `cu_seq_k`, `max_q`, `max_k`, as
              `torch.nn.attention.varlen.varlen_attn` takes them for the flattened rows;
            - ``"flex"``: `attention_mask`, a `BlockMask` of shape (R, 1, L, L), for FlexAttention;
            - ``"bool"``: `attention_mask`, bool (R, 1, L, L), True where a query may attend, for
              SDPA;
            - ``"additive"``: `attention_mask` (R, 1, L, L) of 0 and the dtype's minimum, for SDPA
              and eager attention;
            - ``"none"``: nothing beside `position_ids`; for padded batches of causal models, and
              for models that find the samples by their positions. Transformers' do so only with
              ``use_cache=False`` and without an `attention_mask`.
        pad_token_id (int): What fills the padding of `input_ids`.
        dtype (torch.dtype): Of an additive mask: float32 (the default), bfloat16 or float16.
        window (int | Mapping): Sliding window of a mask, the block mask among them: so many keys
            with the query's own; where attention is not causal, the keys less than so far away. By
            layer type, such as ``{"full_attention": None, "sliding_attention": 512}``, there is a
            dict of masks, as transformers' models with layers of several types take it.
        causal (bool): Whether later tokens are hidden, in the mask and by the model.
        position_start (int): The position of the first token of each sample; some models number
            from 2.
        outputs (Collection[str]): Further tensors to hand out:

            - ``"segment_ids"``: int32 (R, L): 1, 2, … within a row, 0 on padding;
            - ``"seq_idx"``: int32 (R, L): 0, 1, … within a row, for state-space layers, which start
              anew where it changes; each segment of padding has a number of its own;
            - ``"shift_labels"``: int64 (R, L): the label of the next token, -100 at the end of a
              row, for losses that do not shift and sequences that are split over ranks;
            - ``"cu_seqlens"``, ``"cu_seqlens_padded"``: int32 (S+1,): where segments begin, by
              their true lengths and by the slots in memory; they differ where samples are aligned;
            - ``"max_seqlen"``: int: the longest segment.
        max_segments (int): Repeat the end of all boundaries until there are so many segments, for
            CUDA graphs, and give the longest length that a segment may have in place of the longest
            there is. Then only the tokens differ between batches of rows of one length.
        cut_tail (bool): Cut the padded tails so that they are no longer than the longest sample of
            the batch: for rotary embeddings that change with the largest position.
        pad_values (Mapping): What fills the padding of further per-token keys, by key; 0 where not
            given. Every batch has these keys.
        split (str): ``train``, or ``eval`` for batches of an evaluation, which may have another
            layout and size.
        **keys: Settings by name; they override those of `config`.

    Raises:
        TypeError: As for `Config`; if a number is not an integer.
        ValueError: As for `Config`; if `attention` or one of `outputs` is unknown, a number is too
            small, or an option has nothing to act on or does not go with another.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        attention: str,
        pad_token_id: int = 0,
        dtype: torch.dtype | None = None,
        window: int | Mapping[str, int | None] | None = None,
        causal: bool = True,
        position_start: int = 0,
        outputs: Collection[str] = (),
        max_segments: int | None = None,
        cut_tail: bool = False,
        pad_values: Mapping[str, float] | None = None,
        split: Split = "train",
        **keys: Any,
    ) -> None:
        if attention not in _ATTENTION:
            raise ValueError(f"attention is {attention!r}, but must be one of {_names(_ATTENTION)}")
        if attention == "additive":
            dtype = torch.float32 if dtype is None else dtype
            if dtype not in MASK_DTYPES:
                raise ValueError(
                    f"dtype is {dtype}, but an additive mask is of {_names(MASK_DTYPES)}"
                )
        elif dtype is not None:
            raise ValueError(f"dtype is that of an additive mask, but attention is {attention!r}")
        if window is not None and attention not in (*_MASKS, "flex"):
            raise ValueError(
                f"window limits a mask, but attention={attention!r} makes none; set the window in "
                "the model"
            )
        if pad_token_id is None:
            raise TypeError(
                "pad_token_id is None, but must be an integer; where a tokenizer has none, any id "
                "will do: padding is neither seen by samples nor trained on"
            )
        self.config = make_config(config, keys)
        self.split = checked_split(split)
        self.attention = attention
        self.pad_token_id = integer("pad_token_id", pad_token_id)
        self.dtype = dtype
        self.window: int | dict[str, int | None] | None
        if isinstance(window, Mapping):
            self.window = {kind: _checked_window(size) for kind, size in window.items()}
        else:
            self.window = _checked_window(window)
        self.causal = causal
        self.position_start = integer("position_start", position_start, least=0)
        self.outputs = _checked_outputs(outputs)
        self.max_segments = max_segments
        if max_segments is not None:
            self.max_segments = integer("max_segments", max_segments, least=1)
            if attention not in _BOUNDARIES and not set(self.outputs).intersection(_BORDERS):
                raise ValueError(
                    f"max_segments is the number of segments in boundaries, but "
                    f"attention={attention!r} has none; ask for outputs=('cu_seqlens',)"
                )
        self.cut_tail = cut_tail
        self.pad_values = {
            key: _checked_padding(f"pad_values[{key!r}]", value)
            for key, value in (pad_values or {}).items()
        }
        for key in ("input_ids", "labels"):
            if key in self.pad_values:
                raise ValueError(
                    f"pad_values has {key!r}, but the padding of input_ids is pad_token_id, and "
                    f"that of labels is {IGNORED_LABEL}"
                )
        if not causal and self.config.align_samples_to > 1 and attention not in _MASKS:
            raise ValueError(
                f"align_samples_to {self.config.align_samples_to} leaves padding behind the "
                f"samples, which they see if attention is not causal and attention={attention!r}; "
                "use a mask"
            )

    @classmethod
    def for_model(
        cls,
        model: torch.nn.Module,
        config: Config | None = None,
        *,
        pad_token_id: int | None = None,
        outputs: Collection[str] = (),
        max_segments: int | None = None,
        pad_values: Mapping[str, float] | None = None,
        split: Split = "train",
        **keys: Any,
    ) -> Collator:
        """Choose `attention` and what belongs to it from a model of transformers.

        The choice follows the model's attention implementation, dtype, windows, positions and
        rotary embedding; `multipack._for_model` has the rules. For a Mistral with sdpa and a window
        of 4096:

            >>> collator = Collator.for_model(model, config)  # doctest: +SKIP
            >>> collator.attention, collator.window  # doctest: +SKIP
            ('bool', 4096)

        Nothing is run. To see whether it isolates, give a batch to `multipack.verify_isolation`.

        Args:
            model (torch.nn.Module): A model of transformers; adapters, compilation and parallel
                wrappers around it are looked through.
            config (Config): The settings. With `sequence_len`, windows that no sample fills are
                left out, and it is checked against the model's positions.
            pad_token_id (int): What fills the padding of `input_ids`; the model's padding id if not
                given, and 0 if it has none.
            outputs (Collection[str]): As for the collator, like all further arguments.
            max_segments (int): As for the collator.
            pad_values (Mapping): As for the collator.
            split (str): As for the collator.
            **keys: Settings by name; they override those of `config`.

        Returns:
            Collator: One whose batches this model takes as ``model(**batch)``.

        Raises:
            TypeError: If it is not a model of transformers.
            ValueError: If the model can't keep samples apart, saying what in it can't; if it has
                too few positions.
        """
        config = make_config(config, keys)
        chosen = choose(model, config, checked_split(split))
        if pad_token_id is not None:
            chosen["pad_token_id"] = pad_token_id
        return cls(
            config,
            outputs=outputs,
            max_segments=max_segments,
            pad_values=pad_values,
            split=split,
            **chosen,
        )

    def __call__(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]]) -> dict[str, Any]:
        """Collate one microbatch.

        A sample is a mapping with `input_ids` and, if it has them, `labels`: lists, one-dimensional
        NumPy arrays or tensors of integers. Without labels every token is supervised. An
        `attention_mask` of ones is taken and dropped, and so are `position_ids` that count from
        `position_start`; both are made anew. `loss_weights`, one for each token or one for the
        sample, become float32 (R, L), 0 wherever the label is -100, so that their sum is what a
        weighted loss is divided by. Further keys with one number for each token are laid out like
        the tokens; those with one number for each sample are stacked in the order of samples.

        A preference pair has `chosen_input_ids` and `rejected_input_ids`, and any key of the
        above under both prefixes. Both sides lie in the same row, chosen first, so that of the
        segments of a row those with odd `segment_ids` are chosen; in the padded layout they are a
        row each. The planner's length of a pair is that of both.

        Args:
            batch: Samples, or rows of samples. Samples alone make one row, or, in the padded
                layout, a row each.

        Returns:
            dict[str, Any]: int64 (R, L) `input_ids`, `labels` and `position_ids`; the keys of
                `attention` and of `outputs`; the further keys of the samples. All on the CPU, in
                memory of their own.

        Raises:
            TypeError: If a key holds something that cannot be collated; labels that are one number
                for each sample among it.
            ValueError: If there are no samples or only empty ones, a row is empty, keys of a sample
                differ in length, only some samples have a key or none has one of `pad_values`, a
                sample holds padding, an integer beyond int64 or a key that the collator makes, one
                is longer than `sequence_len` and not to be truncated or longer than the sampler was
                told, there are more segments than `max_segments`, or the sampler's settings are not
                the collator's.
        """
        items, row_offsets = join_rows(batch, self.config, self.split)
        samples = Samples(items)
        if isinstance(batch, Microbatch):
            pairs = len(samples.prefixes) == 2
            batch.check_lengths(samples.pair_lengths() if pairs else samples.lengths)
        check_padded_keys(self, samples.token_keys)
        samples.check_masks()
        samples.check_positions(self.position_start)
        if len(samples.prefixes) == 2:
            row_offsets = _pair_rows(self, samples, row_offsets)
        result = _finished(self, self._made(samples, row_offsets))

        for key in samples.number_keys:
            _refuse_made(key, result)
            result[key] = samples.numbers(key)
        values = {key: samples.values(key) for key in samples.token_keys}
        weights = samples.loss_weights()
        if weights is not None:
            values["loss_weights"] = weights
        if values:
            offsets, index = samples.places()
        for key, column in values.items():
            spread(self, result, key, column, offsets, index, row_offsets)
        return sendable(result)

    def _made(self, samples: Samples, row_offsets: torch.Tensor) -> ops.Batch:
        """Lay the tokens and labels of samples out."""
        longest = _checked_longest(max(samples.lengths), samples.lengths, self.config)
        options = _options(self, longest)
        tensors = samples.tensors()
        if tensors is not None:
            ids, labels = tensors
            try:
                return ops.collate_list(ids, row_offsets, labels=labels, **options)
            except (TypeError, ValueError):
                pass  # said below by sample and key
        offsets, index = samples.places()
        return ops.collate(
            samples.tokens(), offsets, index, row_offsets, labels=samples.labels(), **options
        )


def join_rows(batch: Sequence[Any], config: Config, split: Split) -> tuple[list[Any], torch.Tensor]:
    """Flatten a microbatch, and say where each row of the tensors begins in it.

    Args:
        batch: Items (samples or their indices), or lists of items.
        config (Config): Its layout says whether items without rows make one row, or a row each.
        split (str): ``train`` or ``eval``.

    Returns:
        tuple[list, torch.Tensor]: The items, and int64 (R+1,) offsets of the rows.

    Raises:
        TypeError: If items and lists of items are mixed.
        ValueError: If there are no items, or items without rows in the layout of real rows; if the
            microbatch was planned with settings that do not go with these.
    """
    if len(batch) == 0:
        raise ValueError("the microbatch is empty, but a batch has at least one sample")
    if isinstance(batch, Microbatch):
        batch.terms.check("the sampler", Terms.of(config, split))
    kind = layout(config, split)
    # By types, of which there are few.
    in_rows = {issubclass(found, _ROW) for found in set(map(type, batch))}
    if all(in_rows):
        items = list(itertools.chain.from_iterable(batch))
        sizes = [len(row) for row in batch]
    elif any(in_rows):
        raise TypeError("the microbatch mixes samples and rows of samples: give either")
    elif kind == "real_rows":
        raise ValueError(
            "multipack_real_batches has several rows, but the microbatch is a list of samples: "
            "give a list of rows, as the sampler yields them"
        )
    else:
        items = list(batch)
        sizes = [len(items)]
    if not items:
        raise ValueError("the rows of the microbatch are empty: every row has at least one sample")
    if kind == "padded":
        sizes = [1] * len(items)
    # Without NumPy, which for a list so short costs more than it saves.
    return items, torch.frombuffer(array("q", [0, *itertools.accumulate(sizes)]), dtype=torch.int64)


def lay_out(
    collator: Collator,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    labels: torch.Tensor | None,
    index: torch.Tensor,
    row_offsets: torch.Tensor,
) -> dict[str, Any]:
    """Collate from flat buffers; see `multipack.ops.collate` for the arguments.

    Returns:
        dict[str, Any]: As from a call of the collator, without further keys.

    Raises:
        ValueError: If all samples are empty, one is longer than `sequence_len` and not to be
            truncated, there are more segments than `max_segments`, or as for the op.
        IndexError: If an index is out of range.
    """
    borders, places = offsets.numpy(), index.numpy()
    lengths = borders[places + 1] - borders[places]
    longest = _checked_longest(int(lengths.max()), lengths, collator.config)
    options = _options(collator, longest)
    made = ops.collate(tokens, offsets, index, row_offsets, labels=labels, **options)
    return _finished(collator, made)


def _options(collator: Collator, longest: int) -> ops.CollateOptions:
    """Return the options of the op for a batch whose longest sample has so many tokens.

    Without those at their default, which torch would take longer to read.
    """
    config, window = collator.config, collator.window
    dense = collator.attention in _MASKS and not isinstance(window, dict)
    options = {
        "row_len": capacity(config, collator.split) if config.pad_to_sequence_len else 0,
        "max_sample_len": longest if collator.cut_tail else config.sequence_len or 0,
        "pad_to_multiple_of": config.pad_to_multiple_of,
        "align_samples_to": config.align_samples_to,
        "pad_token_id": collator.pad_token_id,
        "position_start": collator.position_start,
        "mask_first_label": config.mask_first_label,
        "padded_tail": config.padded_tail,
        "attention_mask": collator.attention if dense else "none",
        "causal": collator.causal,
        "window": None if isinstance(window, dict) else window,
        "mask_dtype": collator.dtype,
    }
    changed = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
    return cast("ops.CollateOptions", changed)


def _finished(collator: Collator, made: ops.Batch) -> dict[str, Any]:
    """Name what the op made as the consumer of the batch does, and make the rest."""
    window = collator.window
    batch: dict[str, Any] = {
        "input_ids": made.input_ids,
        "labels": made.labels,
        "position_ids": made.position_ids,
    }
    if isinstance(window, dict):
        batch["attention_mask"] = {k: _mask(collator, made, size) for k, size in window.items()}
    elif collator.attention in _MASKS:
        batch["attention_mask"] = made.attention_mask
    elif collator.attention == "flex":
        batch["attention_mask"] = _mask(collator, made, window)
    elif collator.attention in _BOUNDARIES:
        # Kernels want the slots that the tokens lie in, which alignment makes wider.
        borders = _constant(collator, made.cu_seqlens_padded)
        most = _longest_segment(collator, made, made.cu_seqlens_padded)
        names = _BOUNDARIES[collator.attention]
        batch.update(zip(names, (borders, most, borders, most), strict=True))
    for name in collator.outputs:
        batch[name] = _output(name, collator, made)
    return batch


def spread(
    collator: Collator,
    batch: dict[str, Any],
    key: str,
    values: torch.Tensor,
    offsets: torch.Tensor,
    index: torch.Tensor,
    row_offsets: torch.Tensor,
) -> None:
    """Lay a further key with one number for each token out, and add it to the batch.

    Args:
        collator (Collator): The one that made the batch.
        batch (dict): From `lay_out` with the same offsets, index and rows.
        key (str): The key; `loss_weights` become float32, and 0 wherever there is no label.
        values (torch.Tensor): (T,) of any dtype, sharing the offsets of the tokens.
        offsets (torch.Tensor): As for `lay_out`.
        index (torch.Tensor): As for `lay_out`.
        row_offsets (torch.Tensor): As for `lay_out`.

    Raises:
        ValueError: If the batch has such a key, or the dtype cannot hold the padding.
    """
    _refuse_made(key, batch)
    weights = key == "loss_weights"
    batch[key] = ops.pack_values(
        values.float() if weights else values,
        offsets,
        index,
        row_offsets,
        row_len=batch["input_ids"].shape[1],
        max_sample_len=collator.config.sequence_len or 0,
        align_samples_to=collator.config.align_samples_to,
        pad=0 if weights else collator.pad_values.get(key, 0),
    )
    if weights:
        batch[key].masked_fill_(batch["labels"] == IGNORED_LABEL, 0)


def check_padded_keys(collator: Collator, keys: Collection[str]) -> None:
    """Refuse padding for a key that is not among the further keys with a number for each token.

    Args:
        collator (Collator): The one whose `pad_values` are looked at.
        keys (Collection[str]): The further keys of the samples.

    Raises:
        ValueError: If a key is missing, with those that there are.
    """
    for key in collator.pad_values:
        if key not in keys:
            found = f"only {', '.join(sorted(keys))}" if keys else "none such"
            raise ValueError(
                f"pad_values has {key!r}, which is no further key with one number for each token: "
                f"the samples have {found}"
            )


def _refuse_made(key: str, batch: dict[str, Any]) -> None:
    """Refuse a key of samples that would take the place of one that is made here."""
    if key in batch or key in _OUTPUTS:
        raise ValueError(f"the samples have {key!r}, which the collator makes itself: drop the key")


def _mask(collator: Collator, made: ops.Batch, window: int | None) -> Any:
    """Return the mask of a batch: a block mask for FlexAttention, otherwise a dense one."""
    if collator.attention == "flex":
        return flex_block_mask(
            _to_the_end(made.cu_seqlens_padded, made.input_ids.numel()),
            rows=made.input_ids.shape[0],
            causal=collator.causal,
            window=window,
        )
    dtype = collator.dtype or torch.bool
    return ops.block_mask(made.segment_ids, causal=collator.causal, window=window, dtype=dtype)


def _output(name: str, collator: Collator, made: ops.Batch) -> Any:
    """Return one of the further outputs."""
    if name in _BORDERS:
        return _constant(collator, getattr(made, name))
    if name == "max_seqlen":
        return _longest_segment(collator, made, made.cu_seqlens)
    if name == "shift_labels":
        return pad(made.labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    if name == "seq_idx":
        return _numbered(collator, made)
    return made.segment_ids


def _numbered(collator: Collator, made: ops.Batch) -> torch.Tensor:
    """Return the number within its row of the segment of each token.

    Segment ids that are not to be kept may become these numbers in place.
    """
    ids = made.segment_ids.numpy()
    # Where samples are aligned there may be padding in each slot, otherwise only at a row's end.
    aligned = collator.config.align_samples_to > 1
    padded = not ids.all() if aligned else 0 in ids[:, -1].tolist()
    if not padded:  # the segments are the samples
        # For new memory the kernel takes ten times as long as this.
        kept = "segment_ids" in collator.outputs
        return torch.from_numpy(np.subtract(ids, 1, out=None if kept else ids))
    rows, row_len = ids.shape
    borders = _to_the_end(made.cu_seqlens_padded, rows * row_len).numpy()
    first = np.searchsorted(borders, np.arange(rows) * row_len)
    numbers = np.arange(len(borders) - 1) - first[borders[:-1] // max(row_len, 1)]
    # NumPy's, because for this little work torch wakes up threads, which takes longer.
    each = np.repeat(numbers.astype(np.int32), np.diff(borders))
    return torch.from_numpy(each).view(rows, row_len)


def _constant(collator: Collator, borders: torch.Tensor) -> torch.Tensor:
    """Return boundaries of `max_segments` segments, those behind the last without tokens."""
    most, segments = collator.max_segments, borders.numel() - 1
    if most is None:
        return borders
    if segments > most:
        raise ValueError(
            f"the microbatch has {segments} segments, padded tails among them, more than "
            f"max_segments {most}: raise it, or set sample_packing_bin_size"
        )
    return torch.cat([borders, borders[-1:].expand(most - segments)])


def _longest_segment(collator: Collator, made: ops.Batch, borders: torch.Tensor) -> int:
    """Return the longest segment, or the longest that there may be where that must not change."""
    if collator.max_segments is None:
        same = borders is made.cu_seqlens or collator.config.align_samples_to == 1
        return int(made.max_seqlen if same else borders.diff().max())
    row_len, align = made.input_ids.shape[1], collator.config.align_samples_to
    bound = collator.config.sequence_len or row_len
    return min(-(-bound // align) * align, row_len)


def _to_the_end(borders: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return boundaries that take in the padded tail, which they may have left out."""
    if int(borders[-1]) == tokens:
        return borders
    return torch.cat([borders, borders.new_tensor([tokens])])


def _checked_longest(longest: int, lengths: Iterable[Any], config: Config) -> int:
    """Return the longest sample after truncation; refuse over-long ones without it, or no tokens.

    The planner leaves both out, so that the lengths that it was given were others.
    """
    bound = config.sequence_len
    if longest == 0:
        raise ValueError(
            "all samples of the microbatch are empty: leave them out, as the sampler does"
        )
    if bound is None or longest <= bound:
        return longest
    if config.excess_length_strategy == "truncate":
        return bound
    sample, length = next((i, int(n)) for i, n in enumerate(lengths) if n > bound)
    raise ValueError(
        f"sample {sample} of the microbatch has {length} tokens, more than sequence_len {bound}; "
        "plan with the lengths of this data, raise sequence_len, or set excess_length_strategy to "
        "truncate"
    )


def _pair_rows(collator: Collator, samples: Samples, row_offsets: torch.Tensor) -> torch.Tensor:
    """Return where rows begin among the sides of pairs, and refuse pairs that are over-long."""
    bound = collator.config.sequence_len
    for number, length in enumerate(samples.pair_lengths()):
        if bound is not None and length > bound:
            raise ValueError(
                f"sample {number} is a pair of {length} tokens on both sides together, more than "
                f"sequence_len {bound}: a pair counts as one sample, and is never truncated"
            )
    if layout(collator.config, collator.split) == "padded":
        return torch.arange(len(samples.lengths) + 1)
    return row_offsets * 2


def _checked_padding(name: str, value: Any) -> Any:
    """Refuse integers that no tensor of integers holds; there are paddings of other kinds."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return integer(name, value) if is_integer else value


def _checked_window(window: int | None) -> int | None:
    return None if window is None else integer("window", window, least=1)


def _checked_outputs(outputs: Collection[str]) -> tuple[str, ...]:
    """Return the names of further outputs, each once."""
    if isinstance(outputs, str):
        raise TypeError(f"outputs is {outputs!r}, but must be a list of names: [{outputs!r}]")
    for name in outputs:
        if name not in _OUTPUTS:
            raise ValueError(f"outputs has {name!r}, but must be of {_names(_OUTPUTS)}")
    return tuple(dict.fromkeys(outputs))


def _names(names: Sequence[Any]) -> str:
    return ", ".join(str(name) for name in names)
