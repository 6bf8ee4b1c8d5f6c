// block_mask on every device but the CPU, from torch's own operations.
//
// The rule is that of src/batch/mask.rs: a query may attend to the keys of its own row that carry
// its segment id, where causal to none that is later, and with a window to none that is too far. It
// costs a few passes over R * L * L bytes on the device, where a copy of a mask made on the CPU
// would have to cross the bus. No value is read back, so nothing waits for the device, and the meta
// device works as well.
#include "multipack/cpp/library.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>

#include <limits>
#include <optional>

namespace multipack {
namespace {

// The smallest finite number of a mask's dtype.
double lowest(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return std::numeric_limits<float>::lowest();
    case at::kHalf:
      return std::numeric_limits<c10::Half>::lowest();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::lowest();
    default:
      TORCH_CHECK_TYPE(
          false,
          "dtype is torch.",
          c10::getDtypeNames(dtype).first,
          ", but must be torch.bool, torch.float32, torch.bfloat16 or torch.float16");
  }
}

at::Tensor block_mask(
    const at::Tensor& segment_ids,
    bool causal,
    std::optional<int64_t> window,
    std::optional<at::ScalarType> dtype) {
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
  TORCH_CHECK_VALUE(
      window.value_or(1) >= 1, "window is ", window.value_or(1), ", but must be 1 or more");

  const at::Tensor ids = segment_ids.dim() == 1 ? segment_ids.unsqueeze(0) : segment_ids;
  const at::Tensor at = at::arange(ids.size(1), ids.options().dtype(at::kLong));
  const at::Tensor distance = at.unsqueeze(1) - at.unsqueeze(0); // query minus key
  at::Tensor allowed = ids.unsqueeze(2) == ids.unsqueeze(1);
  if (causal) {
    allowed = allowed.logical_and_(distance >= 0);
  }
  if (window) {
    allowed = allowed.logical_and_(distance.abs() < *window);
  }
  allowed = allowed.unsqueeze(1);
  const at::ScalarType kind = dtype.value_or(at::kBool);
  if (kind == at::kBool) {
    return allowed;
  }
  const at::TensorOptions options = ids.options().dtype(kind);
  return at::where(
      allowed, at::scalar_tensor(0, options), at::scalar_tensor(lowest(kind), options));
}

} // namespace

TORCH_LIBRARY_IMPL(multipack, CompositeExplicitAutograd, m) {
  if (!is_first_copy()) {
    return;
  }
  m.impl("block_mask", &block_mask);
}

} // namespace multipack
