"""Does a model keep the samples of a packed batch apart? Found out on the model itself.

A batch can be right and still leak, because the model does something else with it than was meant:
transformers' models ignore `position_ids` under a cache or beside a two-dimensional mask, eager
attention adds a bool mask to the scores, flash attention without boundaries looks for them only
where there is one row. Training then goes on with a loss that looks right. So `verify_isolation`
takes a batch through the model as training does, in two ways:

- It replaces the tokens of some samples, with positions and boundaries as they were, and looks
  whether the logits of any other sample move.
- It runs samples alone, and looks whether they get the logits that they have in the batch. This
  finds what does not depend on tokens: positions that go on, a window or rotary factors that follow
  the row.

Replacing one sample at a time would take N forwards for N samples. Instead the samples are numbered
in binary, and for each digit those with a 0 there are replaced together, then those with a 1. Any
two samples differ in some digit, so each is replaced once while the other stays: all N (N - 1)
ordered pairs are checked in 2 ceil(log2 N) forwards, 12 for 64 samples. (To be missed, leaks of
several samples into one would have to cancel out.) Only when something leaked is its source
searched for, by halving.

With at most `limit` samples run alone, that is 1 + 2 ceil(log2 N) + min(N, limit) forwards without
gradients, the last ones short; in training mode one more, and with dropout another. Beside what a
forward takes, each set of logits is kept for 512 words of the vocabulary, which a leak moves like
all others: 32 MiB for 16,384 tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from multipack import ops
from multipack._for_model import unwrapped
from multipack.collate import IGNORED_LABEL

_WORDS = 512
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BOUNDARIES = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_q")
_LOSS_KEYS = ("labels", "shift_labels", "num_items_in_batch")


@dataclass(frozen=True)
class Place:
    """A sample of a batch: its row, its number there, and its tokens, from `start` to `end`."""

    row: int
    number: int
    start: int
    end: int
    padding: bool = False
    """Whether it is a padded tail, which may reach nothing, but which anything may reach."""

    def __str__(self) -> str:
        kind = "padding" if self.padding else "sample"
        return f"{kind} {self.number} of row {self.row}"


class IsolationError(RuntimeError):
    """A model does something else with a sample in a batch than with the sample alone.

    Attributes:
        target (Place): The sample whose logits are not its own; None if samples could not be told
            apart.
        source (Place): The sample that leaks into it; None if it only differs from itself alone.
        size (float): How far its logits moved or differ. At the worst token, the norm of the
            difference over the norm of the logits.
    """

    def __init__(
        self,
        message: str,
        *,
        target: Place | None = None,
        source: Place | None = None,
        size: float = math.nan,
    ) -> None:
        super().__init__(message)
        self.target = target
        self.source = source
        self.size = size


@dataclass(frozen=True)
class IsolationReport:
    """What `verify_isolation` checked; its text is one sentence."""

    rows: int
    samples: int
    """Samples in the batch. Each was replaced, as was padding, and each was watched."""
    compared: int
    """Samples that were run alone too."""
    moved: float
    """The largest move of a sample's logits when others were replaced, as in `IsolationError`."""
    differs: float
    """The largest difference of a sample's logits in the batch and alone."""
    tolerance: float
    training: bool
    """Whether the model was in training mode."""
    random: bool
    """Whether it drew random numbers there, so that samples were run alone in evaluation mode."""
    forwards: int

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        mode = "training" if self.training else "evaluation"
        alone = ", in evaluation mode because of dropout," if self.random else ""
        return (
            f"isolated: {self.samples} samples in {rows}, {mode} mode; replacing any of them moved "
            f"no other by more than {self.moved:.1e}, and {self.compared} run alone{alone} "
            f"differed by at most {self.differs:.1e}; tolerance {self.tolerance:.1e}, "
            f"{self.forwards} forwards"
        )


def verify_isolation(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    cu_seqlens: torch.Tensor | None = None,
    tolerance: float | None = None,
    limit: int = 32,
) -> IsolationReport:
    """Check that no sample of a packed batch reaches another one in this model.

    It is one line before training, with all as it will be there: the model's mode, autocast around
    the call, and in the batch all that the model is called with.

        >>> print(verify_isolation(model, next(iter(loader))))  # doctest: +SKIP
        isolated: 7 samples in 1 row, training mode; replacing any of them moved no other by more
        than 0.0e+00, and 7 run alone differed by at most 3.4e-07; tolerance 3.5e-04, 15 forwards

    The model is called as ``model(**batch)``, on its own device, without labels unless it needs
    them. Whether there is a cache is left to the batch and the model's config: if training passes
    ``use_cache=False``, so must the batch. Parameters, gradients, buffers and mode of the model and
    torch's random numbers are afterwards what they were.

    In training mode all forwards draw the same random numbers, so that dropout does not look like a
    leak; if there is any, samples are run alone in evaluation mode. Whatever depends on the whole
    batch, such as experts that drop tokens beyond a capacity, is a leak and reported as one.

    Args:
        model (torch.nn.Module): Any that takes the batch and returns logits for each token: a
            tensor (R, L, V), a tuple that begins with it, or an object with `logits` or
            `last_hidden_state`.
        batch (Mapping): From a `Collator` or alike; at least `input_ids` (R, L).
        cu_seqlens (torch.Tensor): Where samples begin in the R·L tokens. If not given, what the
            batch says: boundaries, else positions, else a mask of four dimensions.
        tolerance (float): How far logits may move or differ, over their norm. If not given, the
            square root of the resolution of the coarsest dtype that the model computes in: 3.5e-4
            in float32, 0.03 in float16 and TF32, 0.09 in bfloat16.
        limit (int): Most samples to run alone, spread evenly over the batch.

    Returns:
        IsolationReport: What was checked.

    Raises:
        IsolationError: If a sample moves the logits of another, naming both; if one gets other
            logits alone; if positions go on from one sample to the next; if nothing says that there
            is more than one sample.
        TypeError: If the batch, or what the model returns, is of another kind.
        ValueError: If the logits do not depend on the tokens or are not finite, or if
            `cu_seqlens`, `tolerance` or `limit` are out of range.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.numel() == 0:
        raise TypeError("the batch must be a mapping with input_ids of shape (R, L)")
    if limit < 0:
        raise ValueError(f"limit is {limit}, but must be 0 or more")
    places = _places(batch, cu_seqlens)
    run = _Run(model, batch, places)
    if tolerance is None:
        tolerance = run.noise()
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}, but must be finite and not negative")
    random = False
    with _untouched(model, run.device):
        run.measure()
        if model.training:
            random = not torch.equal(run.base, run.forward(run.batch, seed=1))
        moved = _check_others(run, tolerance)
        if random:
            model.eval()
            run.measure()
        count = min(limit, len(run.watched))
        compared = [run.watched[i * len(run.watched) // count] for i in range(count)]
        differs = _check_alone(run, compared, tolerance)
    return IsolationReport(
        rows=ids.shape[0],
        samples=len(run.watched),
        compared=len(compared),
        moved=moved,
        differs=differs,
        tolerance=tolerance,
        training=model.training,
        random=random,
        forwards=run.forwards,
    )


def _check_others(run: _Run, tolerance: float) -> float:
    """Replace samples, digit by digit of their numbers; return how far another one moved."""
    largest = 0.0
    for digit in range((len(run.places) - 1).bit_length()):
        for value in (0, 1):
            replaced = [i for i in range(len(run.places)) if i >> digit & 1 == value]
            logits = run.replace(replaced)
            if torch.equal(logits, run.base):
                raise ValueError("the logits do not depend on input_ids, so no leak could be seen")
            moves = {i: run.distance(logits, i) for i in run.watched if i >> digit & 1 != value}
            worst = max(moves, key=moves.__getitem__, default=None)
            if worst is None:
                continue
            if moves[worst] > tolerance:
                raise _leak(run, replaced, worst, moves[worst], tolerance)
            largest = max(largest, moves[worst])
    return largest


def _leak(
    run: _Run, sources: list[int], target: int, move: float, tolerance: float
) -> IsolationError:
    """Halve the sources until one is left, keeping the half that moves the target further."""
    while len(sources) > 1:
        halves = (sources[: len(sources) // 2], sources[len(sources) // 2 :])
        moves = [run.distance(run.replace(half), target) for half in halves]
        further = moves.index(max(moves))
        sources, move = halves[further], moves[further]
    source, moved = run.places[sources[0]], run.places[target]
    return IsolationError(
        f"{source} leaks into {moved}, whose logits moved by {move:.1e} of their norm when its "
        f"tokens were replaced, more than the tolerance {tolerance:.1e}{_suspicion(run)}",
        target=moved,
        source=source,
        size=move,
    )


def _check_alone(run: _Run, samples: list[int], tolerance: float) -> float:
    """Run samples alone; return how far the worst one is from its logits in the batch."""
    largest = 0.0
    for sample in samples:
        place = run.places[sample]
        size = _difference(run.forward(_alone(run, place)), run.base[run.tokens(place)])
        if size > tolerance:
            raise IsolationError(
                f"{place} has other logits in the batch than alone: they differ by {size:.1e} of "
                f"their norm, more than the tolerance {tolerance:.1e}, though no other sample's "
                "tokens move them; its positions, the window of its mask, or factors that follow "
                "the longest position in the batch are others",
                target=place,
                size=size,
            )
        largest = max(largest, size)
    return largest


class _Run:
    """A model, a batch on its device, and the logits that it gives."""

    base: torch.Tensor
    """Logits of the batch as it is."""

    def __init__(
        self, model: torch.nn.Module, batch: Mapping[str, Any], places: list[Place]
    ) -> None:
        self.model = model
        self.places = places
        tensor = next(model.parameters(), next(model.buffers(), batch["input_ids"]))
        self.device = tensor.device
        self.config = getattr(unwrapped(model), "config", None)
        needed = _needed(model)
        self.batch = {
            key: _move(value, self.device)
            for key, value in batch.items()
            if key not in _LOSS_KEYS or key in needed
        }
        self.ids: torch.Tensor = self.batch["input_ids"]
        self.watched = [i for i, place in enumerate(places) if not place.padding]
        owner = torch.full((self.ids.numel(),), -1)
        for i, place in enumerate(places):
            owner[self.tokens(place)] = i
        self.owner = owner.to(self.device)
        known, numbers = self.ids.flatten().unique(return_inverse=True)
        if len(known) == 1:
            known = torch.cat([known, torch.where(known > 0, known - 1, known + 1)])
        # Each token becomes another one of the batch: a word that the model surely knows.
        self.other = known[(numbers + 1) % len(known)]
        self.forwards = 0

    def noise(self) -> float:
        """What rounding may do to logits, in the coarsest dtype that the model computes in."""
        kind = self.device.type
        dtypes = {p.dtype for p in self.model.parameters() if p.dtype in _FLOATS}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        coarsest = max(torch.finfo(dtype).eps for dtype in dtypes or {torch.float32})
        if kind == "cuda" and torch.get_float32_matmul_precision() != "highest":
            coarsest = max(coarsest, torch.finfo(torch.float16).eps)  # as many digits as TF32
        return math.sqrt(coarsest)

    def measure(self) -> None:
        """Run the batch as it is, for the others to be compared with."""
        self.base = self.forward(self.batch)
        for place in (self.places[i] for i in self.watched):
            if not self.base[self.tokens(place)].isfinite().all():
                raise ValueError(f"the logits of {place} are not finite and can't be compared")

    def replace(self, samples: list[int]) -> torch.Tensor:
        """Return the logits with other tokens in these samples."""
        chosen = torch.isin(self.owner, torch.tensor(samples, device=self.device))
        ids = torch.where(chosen, self.other, self.ids.flatten()).view_as(self.ids)
        return self.forward({**self.batch, "input_ids": ids})

    def forward(self, batch: Mapping[str, Any], seed: int = 0) -> torch.Tensor:
        """Return the logits, (T, W) of at least float32: some words for each of all T tokens."""
        torch.manual_seed(seed)
        self.forwards += 1
        output = self.model(**batch)
        logits = output
        if isinstance(output, Mapping) and "logits" in output:
            logits = output["logits"]
        elif hasattr(output, "logits"):
            logits = output.logits
        elif hasattr(output, "last_hidden_state"):
            logits = output.last_hidden_state
        elif isinstance(output, tuple):
            logits = output[0]
        ids = batch["input_ids"]
        if not isinstance(logits, torch.Tensor):
            raise TypeError(
                f"the model returned {type(output).__name__} without logits: wrap it so that it "
                "returns a tensor (R, L, V)"
            )
        words = logits.shape[-1] if logits.ndim > 1 else 0
        if words == 0 or logits.numel() != ids.numel() * words:
            raise TypeError(
                f"the model returned logits of shape {tuple(logits.shape)} for input_ids of shape "
                f"{tuple(ids.shape)}, but there must be some for each token"
            )
        some = logits.reshape(-1, words)[:, :: -(-words // _WORDS)]
        return some.to(torch.promote_types(some.dtype, torch.float32), copy=True)

    def tokens(self, place: Place) -> slice:
        """Where a sample lies in the flattened batch."""
        first = place.row * self.ids.shape[1]
        return slice(first + place.start, first + place.end)

    def distance(self, logits: torch.Tensor, sample: int) -> float:
        """How far a sample's logits are from those that it has in the batch as it is."""
        tokens = self.tokens(self.places[sample])
        return _difference(logits[tokens], self.base[tokens])


def _difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference, at the worst token; NaN counts as inf."""
    difference = (logits - reference).norm(dim=-1)
    # Logits of all zeros differ by nothing, or without bound.
    ratio = torch.where(difference == 0, 0.0, difference / reference.norm(dim=-1))
    return float(ratio.nan_to_num(math.inf).max())


@contextlib.contextmanager
def _untouched(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Leave the model's mode and buffers and torch's random numbers as they were."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # Rotary embeddings that stretch with the longest position bind a new buffer, and write down
    # beside it which length it is for.
    kept = [(m, dict(m._buffers), dict(vars(m))) for m in modules if m._buffers]
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for buffer, value in values:
            buffer.data.copy_(value)
        for module, buffers, attributes in kept:
            if any(module._buffers.get(name) is not buffers[name] for name in buffers):
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def _needed(model: torch.nn.Module) -> set[str]:
    """The arguments that the model cannot be called without."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name for p in parameters if p.default is p.empty}


def _move(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device; lists and mappings are gone through."""
    if isinstance(value, torch.Tensor | BlockMask):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _move(inner, device) for key, inner in value.items()}
    return value


def _alone(run: _Run, place: Place) -> dict[str, Any]:
    """The batch of one sample alone.

    A model of transformers gets no mask: it knows what one sequence may attend to, as in inference.
    Other models get the sample's own square of it.
    """
    length = place.end - place.start
    row, tokens = slice(place.row, place.row + 1), slice(place.start, place.end)
    alone: dict[str, Any] = {}
    for key, value in run.batch.items():
        if run.config is not None and key == "attention_mask":
            continue
        if key.startswith(("cu_seq", "max_")):
            limits = [0, length] if key.startswith("cu_seq") else length
            is_tensor = isinstance(value, torch.Tensor)
            alone[key] = value.new_tensor(limits) if is_tensor else limits
        elif key == "position_ids" and value.ndim == 2:
            start = value[0, 0]
            alone[key] = torch.arange(length, device=value.device).to(value.dtype)[None] + start
        elif isinstance(value, BlockMask):
            alone[key] = _square(value, place)
        elif key == "attention_mask" and isinstance(value, torch.Tensor) and value.ndim == 4:
            alone[key] = value[row if value.shape[0] > 1 else slice(1), :, tokens, tokens]
        elif isinstance(value, torch.Tensor) and value.shape[:2] == run.ids.shape:
            alone[key] = value[row, tokens]
        else:
            alone[key] = value
    return alone


def _square(mask: BlockMask, place: Place) -> BlockMask:
    """The part of a FlexAttention mask in which a sample attends to itself."""

    def inside(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return mask.mask_mod(b + place.row, h, q + place.start, k + place.start)

    length = place.end - place.start
    return create_block_mask(inside, 1, None, length, length, device=mask.kv_num_blocks.device)


def _places(batch: Mapping[str, Any], cu_seqlens: torch.Tensor | None) -> list[Place]:
    """Find the samples of a batch, padded tails among them.

    Raises:
        IsolationError: If there is only one, or positions go on from one to the next.
        ValueError: If `cu_seqlens` are not boundaries of the batch.
    """
    rows, length = batch["input_ids"].shape
    positions: Any = batch.get("position_ids")
    if positions is not None:
        positions = positions.cpu()
    borders = _borders(batch.get("attention_mask"))
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, 0] = True
    end = starts.numel()
    if cu_seqlens is None:
        if positions is not None:
            starts.view(-1)[ops.boundaries(positions.expand(rows, -1))[:-1].long()] = True
        cu_seqlens = next((batch[key] for key in _BOUNDARIES if key in batch), None)
    if cu_seqlens is not None:
        bounds = cu_seqlens.flatten().cpu().long()
        if len(bounds) < 2 or bounds[0] != 0 or bounds.diff().min() < 0 or bounds[-1] > end:
            raise ValueError(
                f"cu_seqlens must rise from 0 to {end} tokens at most, but are {bounds.tolist()}"
            )
        # Behind the last segment the end may be repeated, for boundaries of a constant number.
        starts.view(-1)[bounds[bounds < bounds[-1]]] = True
        end = int(bounds[-1])
    elif borders is not None and int(starts.sum()) == rows:
        starts |= borders
    places = []
    for row, (labels, padding) in enumerate(zip(*_labelled(batch), strict=True)):
        first = starts[row].nonzero().flatten().tolist()
        for number, (start, stop) in enumerate(zip(first, [*first[1:], length], strict=True)):
            stop = min(stop, end - row * length)
            if borders is not None:
                # A slot that is wider than its sample ends with padding that the mask cuts off.
                cut = borders[row % len(borders), start + 1 : stop].nonzero().flatten() + start + 1
                stop = next((gap for gap in cut.tolist() if not labels[gap:stop].any()), stop)
            if stop > start:
                places.append(Place(row, number, start, stop, bool(padding[start])))
    if len(places) == 1:
        raise IsolationError(
            f"nothing tells samples apart in a batch of one row of {length} tokens, since its "
            "position_ids never start anew; if it holds several samples, give cu_seqlens, and if "
            "it holds one, take another batch"
        )
    for place in places if positions is not None else []:
        before = positions[place.row % len(positions), max(place.start - 1, 0) : place.start + 1]
        if len(before) == 2 and before[1] == before[0] + 1:
            raise IsolationError(
                f"{place} starts at position {int(before[1])}, one after the sample before it: "
                "position_ids must start anew in each sample",
                target=place,
            )
    return places


def _labelled(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens have labels, and which are a row's padded tail; bool (R, L), as far as is known.

    A tail is more than one token at the end, without labels and all the same: a single one may be a
    sample of one token, whose label is masked.
    """
    ids, labels = batch["input_ids"].cpu(), batch.get("labels")
    if not isinstance(labels, torch.Tensor) or not bool((labels != IGNORED_LABEL).any()):
        return torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    labelled = labels.cpu() != IGNORED_LABEL
    alike = (~labelled & (ids == ids[:, -1:])).flip(-1).cumprod(-1).flip(-1) == 1
    return labelled, alike & (alike.sum(-1, keepdim=True) > 1)


def _borders(mask: Any) -> torch.Tensor | None:
    """Where a mask of four dimensions keeps a token from its predecessor; bool (R, L) or (1, L)."""
    if isinstance(mask, Mapping):  # by layer type: they have the same borders
        mask = next(iter(mask.values()), None)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        return None
    before = mask[:, 0].diagonal(-1, -2, -1).cpu()
    if mask.is_floating_point():
        # 0 and a large negative number, or, by mistake, 1 and 0.
        allowed = before > 0 if bool(mask.max() > 0) else before == 0
    else:
        allowed = before != 0
    return torch.nn.functional.pad(~allowed, (1, 0))


def _suspicion(run: _Run) -> str:
    """What is known to make transformers' models leak, if the batch or the config has it."""
    implementation = getattr(run.config, "_attn_implementation", None)
    if implementation is None:
        return ""
    mask = run.batch.get("attention_mask")
    if mask is None and "flash" in implementation:
        if run.ids.shape[0] > 1 and not any(key in run.batch for key in _BOUNDARIES):
            return (
                "; without cu_seq_lens_q, flash attention looks for samples in a single row only: "
                "collate with attention='flash'"
            )
    elif mask is None and implementation != "multipack":
        if run.batch.get("use_cache", getattr(run.config, "use_cache", True)):
            return (
                "; transformers looks for samples in position_ids only without a cache: call the "
                "model with use_cache=False"
            )
        return (
            "; position_ids alone say where samples begin, and this model does not look there: "
            "Collator.for_model(model) chooses what it takes, or says that nothing helps"
        )
    if not isinstance(mask, torch.Tensor):
        return ""
    if mask.ndim == 2:
        return (
            "; beside an attention_mask of two dimensions transformers does not look for samples "
            "in position_ids: leave it out"
        )
    if mask.dtype == torch.bool and implementation == "eager":
        return (
            "; eager attention adds a bool mask to the scores, which hardly masks: collate with "
            "attention='additive'"
        )
    if mask.is_floating_point() and bool(mask.max() > 0):
        return (
            "; the mask is of 0 and 1, but a floating-point one is added to the scores: make it "
            "of 0 and the dtype's minimum"
        )
    return ""
