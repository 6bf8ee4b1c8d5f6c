// What the bridge that cxx generates needs to know of torch: the tensor type, and nothing else.
// Every compile unit that sees the bridge pays for what is included here.
#pragma once

#include <ATen/core/Tensor.h>
