// Attention on the CPU.
#include "multipack/cpp/attention.h"

namespace multipack::attention {

Forward cpu_forward(const Inputs& inputs) {
  return portable_forward(inputs);
}

Gradients cpu_backward(const Inputs& inputs, const Saved& saved) {
  return portable_backward(inputs, saved);
}

} // namespace multipack::attention
