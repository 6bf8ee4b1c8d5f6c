"""Pack samples of uneven length end to end for language-model training.

A `plan` says which samples share a row and which rank runs which rows when; `MultipackBatchSampler`
hands it to a DataLoader, and `Collator` or `PackedDataset` make the batches. The ops underneath
are ``torch.ops.multipack``, from the shared library that importing this package loads.
"""

from importlib import metadata

from multipack._config import Config
from multipack._flex import flex_block_mask
from multipack._library import cmake_prefix_path, library_path
from multipack._plan import Plan, Repeat, label_counts, load_plan, plan
from multipack._stats import Statistics, Stats
from multipack.collate import Collator
from multipack.dataset import PackedDataset, RowDataset
from multipack.isolation import IsolationError, IsolationReport, verify_isolation
from multipack.ops import attention, block_mask, boundaries
from multipack.sampler import MultipackBatchSampler
from multipack.streaming import StreamingMultipack

__version__ = metadata.version("multipack")

__all__ = [
    "Collator",
    "Config",
    "IsolationError",
    "IsolationReport",
    "MultipackBatchSampler",
    "PackedDataset",
    "Plan",
    "Repeat",
    "RowDataset",
    "Statistics",
    "Stats",
    "StreamingMultipack",
    "attention",
    "block_mask",
    "boundaries",
    "cmake_prefix_path",
    "flex_block_mask",
    "label_counts",
    "library_path",
    "load_plan",
    "plan",
    "verify_isolation",
]
