// block_mask on every device but the CPU, from torch's own operations.
//
// The rule is that of src/batch/mask.rs: a query may attend to the keys of its own row that carry
// its segment id, where causal to none that is later, and with a window to none that is too far.
//
//   allowed[r, q, k] = ids[r, q] == ids[r, k]                a pass over R * L * L bytes
//                    & (k <= q)                              where causal
//                    & (k > q - window) & (k < q + window)   with a window
//
// Places are compared as vectors that torch broadcasts, a row against a column, so that the result
// of each comparison is one byte per entry. Their differences would be a matrix of int64, eight
// times the mask.
//
// It costs a few passes over R * L * L bytes on the device, where a copy of a mask made on the CPU
// would have to cross the bus, and at most one further L * L of memory beside the mask (beside the
// bool mask, for an additive one).
//
// No value is read back, so nothing waits for the device. Hence one difference from the CPU: there
// uint64 ids that int64 cannot hold are refused, here they are compared like all others.
#include "multipack/cpp/check.h"
#include "multipack/cpp/library.h"
#include "multipack/src/torch/bridge.rs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>
#include <optional>

namespace multipack {
namespace {

// The smallest finite number of an additive mask's dtype.
double lowest(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return std::numeric_limits<c10::Half>::lowest();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::lowest();
    default: // float32, the only other one that check_mask lets pass
      return std::numeric_limits<float>::lowest();
  }
}

// Memory for a mask (R, L, L) whose rows begin at multiples of 16 entries. SDPA's kernels on GPUs
// want that, and would copy a mask that is laid out otherwise, in every layer again.
at::Tensor aligned(const at::Tensor& ids, at::ScalarType dtype) {
  const int64_t row_len = ids.size(1);
  const int64_t stride = (row_len + 15) / 16 * 16;
  return at::empty({ids.size(0), row_len, stride}, ids.options().dtype(dtype))
      .narrow(2, 0, row_len);
}

at::Tensor block_mask(
    const at::Tensor& segment_ids,
    bool causal,
    std::optional<int64_t> window,
    std::optional<at::ScalarType> dtype) {
  need_dense("multipack::block_mask", "segment_ids", segment_ids);
  TORCH_CHECK_TYPE(
      at::isIntegralType(segment_ids.scalar_type(), /*includeBool=*/false),
      "segment_ids has dtype torch.",
      c10::getDtypeNames(segment_ids.scalar_type()).first,
      ", but must be an integer dtype such as torch.int64");
  TORCH_CHECK_VALUE(
      segment_ids.dim() == 1 || segment_ids.dim() == 2,
      "segment_ids has shape ",
      segment_ids.sizes(),
      ", but must be (length,) or (rows, length)");
  const at::Tensor ids = segment_ids.dim() == 1 ? segment_ids.unsqueeze(0) : segment_ids;
  const int64_t row_len = ids.size(1);
  from_rust([&] {
    ffi::check_mask(ids.size(0), row_len, window.has_value(), window.value_or(0), to_rust(dtype));
  });

  const at::Tensor key = at::arange(row_len, ids.options().dtype(at::kLong));
  const at::Tensor query = key.unsqueeze(1);
  at::Tensor allowed = aligned(ids, at::kBool);
  at::eq_out(allowed, ids.unsqueeze(2), ids.unsqueeze(1));
  if (causal) {
    allowed.logical_and_(key <= query);
  }
  if (window) {
    // No two tokens are further apart than the row is long, and so no sum below overflows.
    const int64_t reach = std::min(*window, row_len);
    allowed.logical_and_(key > query - reach);
    if (!causal) {
      allowed.logical_and_(key < query + reach);
    }
  }
  const at::ScalarType kind = dtype.value_or(at::kBool);
  if (kind == at::kBool) {
    return allowed.unsqueeze(1);
  }
  at::Tensor mask = aligned(ids, kind);
  const at::TensorOptions options = ids.options().dtype(kind);
  at::where_out(
      mask, allowed, at::scalar_tensor(0, options), at::scalar_tensor(lowest(kind), options));
  return mask.unsqueeze(1);
}

} // namespace

// Under this key a kernel serves every backend that has none of its own; the CPU has.
TORCH_LIBRARY_IMPL(multipack, CompositeExplicitAutograd, m) {
  if (!owns_ops()) {
    return;
  }
  m.impl("block_mask", &block_mask);
}

} // namespace multipack
