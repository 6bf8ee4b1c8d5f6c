// What the bridge that cxx generates needs to know of torch: the tensor type, and two functions
// that tch lacks or takes many calls for. Every compile unit that sees the bridge pays for what is
// included here.
#pragma once

#include "rust/cxx.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace multipack::ffi {

struct View;

// What has to be known of a tensor to read it. Throws if torch does not let its memory be read.
View look(const at::Tensor& tensor);

// A tensor of the shape `size` and of the dtype of `like`, for large ones; null if there is not so
// much memory. What is in it is whatever was in the memory.
std::unique_ptr<at::Tensor> large(rust::Slice<const int64_t> size, const at::Tensor& like);

} // namespace multipack::ffi
