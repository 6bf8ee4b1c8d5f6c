"""Samples in any form, their further keys, and what is refused of them."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from collating import FORMS, IGNORED, Sample, Samples, collate, error_of, lists

from multipack import Collator, PackedDataset

# ---- forms of samples ----


@pytest.mark.parametrize("form", FORMS)
def test_samples_in_any_form_make_the_same_batch(samples: Samples, form: str) -> None:
    expected = collate(samples([3, 1, 2]), "flash")

    batch = collate(
        [{key: FORMS[form](value) for key, value in s.items()} for s in samples([3, 1, 2])], "flash"
    )

    assert lists(batch) == lists(expected)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_forms_may_be_mixed_in_one_row(samples: Samples) -> None:
    made = samples([3, 1, 2, 4])
    mixed = [
        {"input_ids": form(sample["input_ids"]), "labels": other(sample["labels"])}
        for sample, form, other in zip(
            made,
            (list, FORMS["numpy int32"], FORMS["tensor int64"], FORMS["tensor int32"]),
            (FORMS["tensor int32"], list, FORMS["numpy int64"], FORMS["numpy int32"]),
            strict=True,
        )
    ]

    assert lists(collate(mixed)) == lists(collate(made))


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("input_ids", torch.ones(2, dtype=torch.int64, device="meta")),
        ("labels", torch.ones(2, dtype=torch.int32, device="meta")),
    ],
)
def test_tensors_elsewhere_are_named_by_sample_and_key(key: str, tensor: torch.Tensor) -> None:
    batch = [{"input_ids": torch.arange(2), "labels": torch.arange(2)} for _ in range(3)]
    batch[2][key] = tensor

    assert error_of(TypeError, batch).startswith(
        f"{key} of sample 2 is a {tensor.dtype} tensor on meta, but samples are collated on the CPU"
    )


def test_tensors_that_are_views_are_read_in_their_order() -> None:
    ids = torch.arange(12).view(4, 3)
    views = [ids[:, 1], ids[1], ids[2].expand(3), torch.tensor(7).expand(2), ids.T[0][::2]]

    batch = collate([{"input_ids": view, "labels": view.int()} for view in views])

    assert batch["input_ids"].tolist() == [[1, 4, 7, 10, 3, 4, 5, 6, 7, 8, 7, 7, 0, 6]]
    assert batch["labels"].tolist() == [
        [-100, 4, 7, 10, -100, 4, 5, -100, 7, 8, -100, 7, -100, 6],
    ]


def test_a_sample_may_be_any_mapping(samples: Samples) -> None:
    assert lists(collate([UserDict(s) for s in samples([3, 2])])) == lists(collate(samples([3, 2])))


def test_samples_may_be_stand_ins_for_mappings(samples: Samples) -> None:
    """Whose type is not that of a mapping, although `isinstance` says that they are one."""
    wrapped = [UserDict(s) for s in samples([3, 2])]
    proxies = [weakref.proxy(sample) for sample in wrapped]

    assert lists(collate(proxies)) == lists(collate(wrapped))


def test_samples_without_labels_are_supervised_at_every_token() -> None:
    batch = collate([{"input_ids": [5, 6, 7]}])

    assert batch["labels"].tolist() == [[IGNORED, 6, 7]]


def test_read_only_samples_are_taken_without_a_warning_and_left_alone() -> None:
    ids = np.array([1, 2, 3, 4])
    ids.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = collate([{"input_ids": ids, "labels": ids}], mask_first_label=False)

    for value in batch.values():
        value.fill_(0)
    assert ids.tolist() == [1, 2, 3, 4]


def test_outputs_own_their_memory() -> None:
    """Even where one sample fills the row and nothing would have to be copied."""
    ids = torch.tensor([1, 2, 3])
    batch = collate([{"input_ids": ids, "labels": ids, "weights": ids}], mask_first_label=False)

    for key in ("input_ids", "labels", "weights"):
        assert batch[key].data_ptr() != ids.data_ptr()
        batch[key].fill_(0)
    assert ids.tolist() == [1, 2, 3]


def test_samples_can_be_collated_twice(samples: Samples) -> None:
    made = [{**s, "attention_mask": [1] * len(s["input_ids"])} for s in samples([3, 2])]
    before = copy.deepcopy(made)

    assert lists(collate(made, "bool")) == lists(collate(made, "bool"))
    assert made == before


def test_a_collator_survives_pickle_and_copy(samples: Samples) -> None:
    collator = Collator(sequence_len=8, attention="additive", dtype=torch.bfloat16, window=3)
    expected = lists(collator(samples([3, 2])))

    assert lists(pickle.loads(pickle.dumps(collator))(samples([3, 2]))) == expected
    assert lists(copy.deepcopy(collator)(samples([3, 2]))) == expected
    assert len(pickle.dumps(collator)) < 3000


# ---- further keys ----


def test_keys_with_a_number_for_each_token_are_laid_out_like_the_tokens() -> None:
    batch = collate(
        [
            {"input_ids": [1, 2, 3], "token_type_ids": [0, 1, 1], "weights": [0.5, 1.0, 2.0]},
            {"input_ids": [4], "token_type_ids": [1], "weights": [4.0]},
        ],
        pad_to_multiple_of=3,
        pad_values={"token_type_ids": -1},
    )

    assert batch["token_type_ids"].tolist() == [[0, 1, 1, 1, -1, -1]]
    assert batch["weights"].tolist() == [[0.5, 1.0, 2.0, 4.0, 0.0, 0.0]]
    assert (batch["token_type_ids"].dtype, batch["weights"].dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64]
)
def test_per_token_arrays_keep_their_dtype(dtype: Any) -> None:
    values = np.array([1, 0, 1], dtype)

    batch = collate([{"input_ids": [1, 2, 3], "values": values}])

    assert torch.equal(batch["values"], torch.from_numpy(values)[None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_per_token_tensors_of_dtypes_unknown_to_numpy_are_laid_out(dtype: torch.dtype) -> None:
    parts = [torch.tensor([0.5, 1, 2]).to(dtype), torch.tensor([4.0, 0, 8]).to(dtype)[::2]]

    batch = collate(
        [{"input_ids": list(range(len(part))), "values": part} for part in parts],
        pad_to_multiple_of=6,
        pad_values={"values": -1},
    )

    assert batch["values"].dtype == dtype
    assert batch["values"].float().tolist() == [[0.5, 1, 2, 4, 8, -1]]
    mixed = [{"input_ids": [1], "values": parts[0][:1]}, {"input_ids": [1], "values": [1.0]}]
    assert error_of(TypeError, mixed) == (
        f"values of sample 1 is list, but where one sample has {dtype} all have it, one number for "
        "each token"
    )


def test_keys_with_one_number_for_each_sample_are_stacked() -> None:
    batch = collate(
        [
            {"input_ids": [1, 2], "score": 0.5, "source": 3, "kept": True},
            {"input_ids": [3], "score": np.float32(1.5), "source": torch.tensor(4), "kept": False},
        ]
    )

    assert (batch["score"].dtype, batch["score"].tolist()) == (torch.float32, [0.5, 1.5])
    assert (batch["source"].dtype, batch["source"].tolist()) == (torch.int64, [3, 4])
    assert (batch["kept"].dtype, batch["kept"].tolist()) == (torch.bool, [True, False])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            "a story",
            "text of sample 0 is str, but must hold numbers, one for each token or one for the "
            "sample; drop the key if no model takes it",
        ),
        (
            None,
            "text of sample 0 is NoneType, but must hold numbers, one for each token or one for "
            "the sample; drop the key if no model takes it",
        ),
        (
            ["a", "b"],
            "text of sample 0 is list, but must hold numbers, one for each token or one for the "
            "sample; drop the key if no model takes it",
        ),
        (
            [[1], [2, 3]],
            "text of sample 0 is list, but must hold numbers, one for each token or one for the "
            "sample; drop the key if no model takes it",
        ),
        (
            [[1, 2], [3, 4]],
            "text of sample 0 has shape (2, 2), but must be one number for each token, of shape "
            "(2,)",
        ),
        (
            torch.ones(2, requires_grad=True),
            "text of sample 0 is a torch.float32 tensor on cpu, but samples are collated on the "
            "CPU, without gradients, from dtypes that NumPy has; convert it, and move the "
            "finished batch",
        ),
        (
            torch.ones(2, dtype=torch.bfloat16, device="meta"),
            "text of sample 0 is a torch.bfloat16 tensor on meta, but samples are collated on the "
            "CPU, without gradients, from dtypes that NumPy has; convert it, and move the "
            "finished batch",
        ),
        (
            torch.ones(2, 2, dtype=torch.bfloat16),
            "text of sample 0 is a torch.bfloat16 tensor of shape (2, 2), but where one sample has "
            "torch.bfloat16 all have it, one number for each token",
        ),
    ],
)
def test_keys_that_hold_anything_else_are_refused_by_name(value: Any, text: str) -> None:
    assert error_of(TypeError, [{"input_ids": [1, 2], "text": value}]) == text


def test_a_key_that_is_a_number_in_one_sample_and_not_in_another_is_refused() -> None:
    batch = [{"input_ids": [1], "score": 1}, {"input_ids": [2], "score": [1]}]

    assert error_of(TypeError, batch) == (
        "score of sample 1 is list, but sample 0 has one number there"
    )


@pytest.mark.parametrize(
    "weights", [[[1.0, 2.0, 3.0], [4.0, 5.0]], [2, 0.5]], ids=["token", "sample"]
)
def test_loss_weights_are_per_token_and_0_where_there_is_no_loss(weights: Any) -> None:
    """The sum of the weights is what a weighted loss is divided by, borders left out."""
    batch = collate(
        [
            {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "loss_weights": weights[0]},
            {"input_ids": [4, 5], "labels": [4, 5], "loss_weights": weights[1]},
        ],
        pad_to_multiple_of=8,
    )

    each = [3.0, 5.0] if isinstance(weights[0], list) else [2.0, 0.5]
    assert batch["loss_weights"].tolist() == [[0, 0, each[0], 0, each[1], 0, 0, 0]]
    assert batch["loss_weights"].dtype == torch.float32


def test_a_weight_that_is_none_is_refused() -> None:
    batch = [{"input_ids": [1], "loss_weights": 1.0}, {"input_ids": [1], "loss_weights": [1.0]}]

    assert error_of(TypeError, batch) == (
        "loss_weights of sample 1 is list, but sample 0 has one number there"
    )


@pytest.mark.parametrize("key", ["shift_labels", "seq_idx", "cu_seq_lens_q", "max_length_k"])
def test_a_key_that_the_collator_makes_is_refused(key: str) -> None:
    """It would take the place of what the batch needs, or be padded with the wrong number."""
    assert error_of(ValueError, [{"input_ids": [1, 2], key: [1, 2]}], attention="flash") == (
        f"the samples have '{key}', which the collator makes itself: drop the key"
    )


# ---- preference pairs ----


def pair(chosen: list[int], rejected: list[int], **keys: Any) -> Sample:
    return {"chosen_input_ids": chosen, "rejected_input_ids": rejected, **keys}


def test_both_sides_of_a_pair_lie_in_one_row_as_samples_of_their_own() -> None:
    pairs = [
        pair([1, 2, 3], [1, 4], chosen_labels=[-100, 2, 3], rejected_labels=[-100, 4], margin=0.5),
        pair([5, 6], [5, 7, 8], chosen_labels=[5, 6], rejected_labels=[5, -100, 8], margin=2),
    ]
    batch = collate(pairs, "flash", outputs=["segment_ids"])

    assert batch["input_ids"].tolist() == [[1, 2, 3, 1, 4, 5, 6, 5, 7, 8]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 4, -100, 6, -100, -100, 8]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 7, 10]
    chosen = batch["segment_ids"] % 2 == 1
    assert batch["input_ids"][chosen].tolist() == [1, 2, 3, 5, 6]
    assert batch["margin"].tolist() == [0.5, 2]


def test_pairs_stay_together_in_rows_and_get_a_row_for_each_side_if_padded() -> None:
    a, b = pair([1, 2], [3]), pair([4], [5, 6])

    rows = collate([[a], [b]], multipack_real_batches=True)
    padded = collate([a, b], sample_packing=False)

    assert rows["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert rows["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]
    assert padded["input_ids"].tolist() == [[1, 2], [3, 0], [4, 0], [5, 6]]


def test_further_keys_of_pairs_are_those_of_their_sides() -> None:
    batch = collate(
        [
            pair(
                [1, 2],
                [3],
                chosen_score=0.5,
                rejected_score=-1,
                chosen_kind=[7, 8],
                rejected_kind=[9],
                chosen_attention_mask=[1, 1],
                rejected_attention_mask=[1],
                chosen_loss_weights=2.0,
                rejected_loss_weights=3.0,
            )
        ],
        mask_first_label=False,
    )

    assert batch["kind"].tolist() == [[7, 8, 9]]
    assert batch["loss_weights"].tolist() == [[2, 2, 3]]
    assert (batch["chosen_score"].tolist(), batch["rejected_score"].tolist()) == ([0.5], [-1])


@pytest.mark.parametrize(
    ("sample", "keys", "kind", "text"),
    [
        (
            pair([1], [2], chosen_labels=[1]),
            {},
            ValueError,
            "the samples have 'chosen_labels', but no 'rejected_labels': both sides of a pair have "
            "the same keys",
        ),
        (
            pair([1], [2], input_ids=[3]),
            {},
            ValueError,
            "the samples have 'input_ids' beside 'chosen_input_ids': give samples or pairs",
        ),
        (
            pair([1], [2], prompt_ids=[3]),
            {},
            TypeError,
            "prompt_ids of sample 0 is list, but what a pair does not have on either side is one "
            "number; drop the key if no model takes it",
        ),
        (
            pair([1], []),
            {},
            ValueError,
            "rejected_input_ids of sample 0 is empty, but both sides of a pair have tokens",
        ),
        (
            pair([1, 2], [2], chosen_labels=[1, 2], rejected_labels=[1, 2]),
            {},
            ValueError,
            "sample 0 has 1 rejected_input_ids but 2 rejected_labels: give one for each token",
        ),
        (
            pair([1, 2], [2], chosen_attention_mask=[1, 1], rejected_attention_mask=[0]),
            {},
            ValueError,
            "sample 0 has rejected_attention_mask 0 at token 0, but samples come without padding: "
            "tokenise with padding=False, or cut the padding off",
        ),
        (
            pair([1, 2, 3], [4, 5]),
            {"sequence_len": 4, "excess_length_strategy": "truncate"},
            ValueError,
            "sample 0 is a pair of 5 tokens on both sides together, more than sequence_len 4: a "
            "pair counts as one sample, and is never truncated",
        ),
    ],
)
def test_pairs_that_do_not_match_are_refused(
    sample: Sample, keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    assert error_of(kind, [sample], **keys) == text


# ---- what it refuses ----


@pytest.mark.parametrize("key", ["labels", "attention_mask", "position_ids", "weights"])
def test_keys_of_other_lengths_than_the_ids_are_refused(samples: Samples, key: str) -> None:
    """Joined without a look, they would slide along for all samples that follow."""
    made = samples([4, 3, 2, 5, 1, 2])
    for sample in made:
        sample.setdefault(key, [1] * len(sample["input_ids"]))
    made[3][key] = made[3][key][:4]

    assert error_of(ValueError, made) == (
        f"sample 3 has 5 input_ids but 4 {key}: give one for each token"
    )


@pytest.mark.parametrize("key", ["labels", "input_ids", "weights"])
def test_a_key_that_only_some_samples_have_is_refused(key: str) -> None:
    made: list[Sample] = [{"input_ids": [1], "labels": [1], "weights": [1]} for _ in range(3)]
    del made[2][key]

    assert error_of(ValueError, made) == (
        f"sample 2 has no '{key}', but sample 0 has: give it to all samples, or to none"
    )
    assert error_of(ValueError, made[::-1]) == (
        f"sample 0 has no '{key}', but sample 1 has: give it to all samples, or to none"
    )


def test_samples_without_ids_are_refused() -> None:
    assert error_of(ValueError, [{"ids": [1], "labels": [1]}]) == (
        "the samples have no 'input_ids', but ids, labels"
    )


@pytest.mark.parametrize("label", [1, np.int64(1), torch.tensor(1)], ids=repr)
def test_one_label_for_a_whole_sample_is_refused(label: Any) -> None:
    assert error_of(TypeError, [{"input_ids": [1, 2, 3], "labels": label}]) == (
        "labels of sample 0 has shape (), but must be one number for each token, of shape (L,)"
    )


@pytest.mark.parametrize(
    ("ids", "shape", "wanted"),
    [
        (torch.ones(1, 5, dtype=torch.int64), "(1, 5)", "(5,)"),
        (torch.ones(2, 5, dtype=torch.int64), "(2, 5)", "(5,)"),
        (np.ones((1, 5), np.int64), "(1, 5)", "(5,)"),
        ([[1, 2, 3, 4, 5]], "(1, 5)", "(5,)"),
        ([torch.ones(5, dtype=torch.int64)], "(1, 5)", "(5,)"),
        (torch.tensor(3), "()", "(L,)"),
    ],
)
def test_ids_of_another_shape_are_refused(ids: Any, shape: str, wanted: str) -> None:
    """The len() of a [1, 5] tensor is 1, which is no length of a sample."""
    assert error_of(TypeError, [{"input_ids": ids}]) == (
        f"input_ids of sample 0 has shape {shape}, but must be one number for each token, of "
        f"shape {wanted}"
    )


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1.5, 2.0], "list"),
        (["a"], "list"),
        ("abc", "str"),
        (None, "NoneType"),
        ([2**64], "list"),
        (np.ones(3), "an array of float64"),
    ],
    ids=repr,
)
def test_ids_that_are_no_integers_are_refused(ids: Any, found: str) -> None:
    batch = [{"input_ids": [1]}, {"input_ids": ids}]

    assert error_of(TypeError, batch) == (
        f"input_ids of sample 1 is {found}, but must hold integers; drop the key if no model "
        "takes it"
    )


@pytest.mark.parametrize(
    ("mask", "token"),
    [([0, 0, 1, 1], 0), ([1, 0, 1, 1], 1), ([1, 1, 1, 0], 3)],
    ids=["left", "inside", "right"],
)
@pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "numpy", "tensor"])
def test_samples_that_come_padded_are_refused(mask: list[int], token: int, form: Any) -> None:
    """Taken with their padding they would be trained on it, as positions count it in."""
    batch = [
        {"input_ids": [4, 5], "attention_mask": form([1, 1])},
        {"input_ids": [0, 0, 4, 6], "attention_mask": form(mask)},
    ]

    assert error_of(ValueError, batch) == (
        f"sample 1 has attention_mask 0 at token {token}, but samples come without padding: "
        "tokenise with padding=False, or cut the padding off"
    )


def test_a_pad_id_inside_a_sample_is_a_token() -> None:
    batch = collate([{"input_ids": [4, 0, 6], "attention_mask": [1, 1, 1]}], pad_token_id=0)

    assert batch["input_ids"].tolist() == [[4, 0, 6]]
    assert batch["labels"].tolist() == [[IGNORED, 0, 6]]


@pytest.mark.parametrize("form", [list, lambda ids: np.array(ids, np.uint64)])
def test_integers_that_int64_does_not_hold_are_refused(form: Any) -> None:
    """They would come out negative."""
    assert error_of(ValueError, [{"input_ids": form([2**63])}]) == (
        "input_ids of sample 0 has 9223372036854775808, but integers are int64, up to "
        "9223372036854775807"
    )


@pytest.mark.parametrize("value", [2**63, np.uint64(2**63), -(2**63) - 1])
def test_stacked_integers_that_int64_does_not_hold_are_refused(value: Any) -> None:
    assert error_of(ValueError, [{"input_ids": [1], "source": value}]) == (
        f"source of sample 0 is {value}, but integers are int64, from -9223372036854775808 to "
        "9223372036854775807"
    )


@pytest.mark.parametrize(
    ("values", "sample", "integer", "dtype"),
    [
        ([2**24 + 1, 0.5], 0, 2**24 + 1, "float32"),
        ([[0.5, 2.5], [1, 2**53 + 1]], 1, 2**53 + 1, "float64"),
        ([np.ones(2, np.float32), np.array([2**53 + 1, 1])], 1, 2**53 + 1, "float64"),
        ([[1, 2], [2**24 + 1, 0.5]], 1, 2**24 + 1, "float32"),
    ],
    ids=["stacked", "lists", "arrays", "one list"],
)
def test_integers_that_fractions_would_round_are_refused(
    values: list[Any], sample: int, integer: int, dtype: str
) -> None:
    """Beside a fraction all become floats, which hold only so many digits."""
    batch = [{"input_ids": [1, 2], "mark": value} for value in values]

    assert error_of(ValueError, batch) == (
        f"mark of sample {sample} has the integer {integer} where there are fractions as well, and "
        f"torch.{dtype} cannot hold it: give integers everywhere, or floats"
    )


def test_integers_beside_fractions_are_taken_where_they_fit() -> None:
    batch = collate(
        [
            {"input_ids": [1, 2], "score": 2**24, "mark": [0.5, 2**24]},
            {"input_ids": [3], "score": 0.5, "mark": [2**53]},
        ]
    )

    assert batch["score"].tolist() == [2**24, 0.5]
    assert batch["mark"].tolist() == [[0.5, 2**24, 2**53]]


@pytest.mark.parametrize("value", [np.longdouble(1.5), np.ones(1, np.longdouble)])
def test_long_doubles_are_refused(value: Any) -> None:
    found = "longdouble" if value.ndim == 0 else f"an array of {np.dtype(np.longdouble)}"

    assert error_of(TypeError, [{"input_ids": [1], "score": value}]) == (
        f"score of sample 0 is {found}, but must hold numbers, one for each token or one for the "
        "sample; drop the key if no model takes it"
    )


@pytest.mark.parametrize("further", [{3: [4]}, {3: [4], "score": 1, None: 2}])
def test_keys_that_are_no_strings_are_refused(further: dict[Any, Any]) -> None:
    text = error_of(TypeError, [{"input_ids": [1], **further}])

    assert text in [f"the samples have the key {key}, but keys are strings" for key in (3, None)]


def test_padding_for_a_key_that_does_not_come_is_refused() -> None:
    """A misspelt key would leave the right one padded with 0."""
    collator = Collator(attention="none", pad_values={"token_type_id": 2})
    with pytest.raises(ValueError) as misspelt:
        collator([{"input_ids": [1, 2], "token_type_ids": [0, 0], "score": 1}])
    with pytest.raises(ValueError) as absent:
        collator([{"input_ids": [1, 2]}])
    with pytest.raises(ValueError) as flat:
        PackedDataset(torch.arange(2), [0, 2], collator=collator, values={"kind": torch.ones(2)})

    text = (
        "pad_values has 'token_type_id', which is no further key with one number for each token: "
        "the samples have "
    )
    assert str(misspelt.value) == text + "only token_type_ids"
    assert str(absent.value) == text + "none such"
    assert str(flat.value) == text + "only kind"


def test_a_mask_that_is_no_integer_is_refused() -> None:
    batch = [{"input_ids": [1, 2], "attention_mask": np.ones(2, np.float32)}]

    assert error_of(TypeError, batch) == (
        "attention_mask of sample 0 is an array of float32, but must hold integers; drop the key "
        "if no model takes it"
    )


def test_positions_that_count_from_0_are_taken_and_others_refused() -> None:
    batch: list[Sample] = [
        {"input_ids": [1, 2], "position_ids": [0, 1]},
        {"input_ids": [3, 4, 5], "position_ids": [0, 1, 2]},
    ]
    assert collate(batch)["position_ids"].tolist() == [[0, 1, 0, 1, 2]]

    batch[1]["position_ids"] = [0, 1, 7]
    assert error_of(ValueError, batch) == (
        "sample 1 has position_ids 7 at token 2, but positions are made anew and count from 0: "
        "drop the key"
    )


def test_positions_that_count_from_where_the_collator_does_are_taken() -> None:
    batch = [{"input_ids": [1, 2], "position_ids": [2, 3]}]
    assert collate(batch, position_start=2)["position_ids"].tolist() == [[2, 3]]

    assert error_of(ValueError, batch) == (
        "sample 0 has position_ids 2 at token 0, but positions are made anew and count from 0: "
        "drop the key"
    )


def test_positions_with_an_axis_for_time_height_and_width_are_refused() -> None:
    """An axis of 3 taken for tokens or rows gives boundaries that do not exist."""
    batch = [{"input_ids": [1, 2, 3, 4], "position_ids": torch.arange(4).expand(3, 4)}]

    assert error_of(TypeError, batch) == (
        "position_ids of sample 0 has shape (3, 4), but must be one number for each token, of "
        "shape (4,)"
    )


@pytest.mark.parametrize(
    ("batch", "keys", "kind", "text"),
    [
        ([], {}, ValueError, "the microbatch is empty, but a batch has at least one sample"),
        (
            [[]],
            {},
            ValueError,
            "the rows of the microbatch are empty: every row has at least one sample",
        ),
        (
            [{"input_ids": []}, {"input_ids": []}],
            {},
            ValueError,
            "all samples of the microbatch are empty: leave them out, as the sampler does",
        ),
        (
            [{"input_ids": [1]}, [{"input_ids": [1]}]],
            {},
            TypeError,
            "the microbatch mixes samples and rows of samples: give either",
        ),
        (
            ["text"],
            {},
            TypeError,
            "sample 0 is a str, but a sample is a mapping with 'input_ids'",
        ),
        (
            [{"input_ids": [1]}],
            {"multipack_real_batches": True},
            ValueError,
            "multipack_real_batches has several rows, but the microbatch is a list of samples: "
            "give a list of rows, as the sampler yields them",
        ),
    ],
)
def test_what_is_no_microbatch_is_refused(
    batch: Any, keys: dict[str, Any], kind: type[Exception], text: str
) -> None:
    assert error_of(kind, batch, **keys) == text


def test_an_empty_row_is_refused(samples: Samples) -> None:
    assert error_of(ValueError, [samples([2]), []], multipack_real_batches=True) == (
        "row 1 starts at 1 and ends at 1 of index: every row has at least one sample"
    )


def test_a_mask_too_large_for_memory_is_refused_before_it_is_made() -> None:
    batch = [{"input_ids": np.zeros(131_072, np.int64)}]

    assert error_of(ValueError, batch, attention="bool") == (
        "a mask of shape (1, 1, 131072, 131072) takes 17179869184 bytes, more than the 8589934592 "
        "that a mask may take; use attention that reads cu_seqlens, or fewer or shorter rows"
    )
