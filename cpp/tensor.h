// What the bridge that cxx generates needs to know of torch: the tensor type, and two functions
// that tch lacks: one look instead of many calls, and memory without the dispatcher. Every compile
// unit that sees the bridge pays for what is included here.
#pragma once

#include "rust/cxx.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace multipack::ffi {

struct View;

// What has to be known of a tensor to read it. Throws if torch does not let its memory be read.
View look(const at::Tensor& tensor);

// A new CPU tensor of the shape `size`, in which is whatever was in the memory. Throws if torch has
// no such tensor.
std::unique_ptr<at::Tensor> fresh(rust::Slice<const int64_t> size, int8_t dtype);

} // namespace multipack::ffi
