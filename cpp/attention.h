// What the files of attention share: the arguments of a call after checking, and who serves it.
//
//   attention.cpp           the public op: autograd, autocast, checks, the choice of a route
//   attention_cpu.cpp       CPU: a fused kernel over segments, heads and blocks
//   attention_cuda.cpp      CUDA: the varlen kernels that torch ships
//   attention_portable.cpp  every other device and dtype: torch's own operations, block by block
//
// Each route gives the same four tensors forward: `out` (T, H, D) like q, `logsumexp` (H, T) in
// the dtype of the arithmetic, and `random`, int64 (2,), from which the backward draws the same
// dropout once more; (0,) without dropout. Rows that no segment holds are zero in all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace multipack::attention {

struct Inputs {
  at::Tensor q; // (T, H, D), contiguous in D
  at::Tensor k; // (T, H_kv, D)
  at::Tensor v;
  at::Tensor cu_seqlens; // (S + 1,) as the caller gave it, on the CPU or on the device of q
  std::optional<int64_t> max_seqlen; // as given
  bool causal;
  int64_t window; // at most T, which is no limit
  double scale;
  double dropout_p;

  int64_t tokens() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t kv_heads() const { return k.size(1); }
  int64_t head_size() const { return q.size(2); }
  int64_t heads_per_kv() const { return heads() / kv_heads(); }
};

// (out, logsumexp, random)
using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// (grad_q, grad_k, grad_v)
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// What the backward has beside the inputs.
struct Saved {
  at::Tensor grad_out; // (T, H, D), contiguous in D
  at::Tensor out;
  at::Tensor logsumexp;
  at::Tensor random;
};

// The borders on the host, checked against T and max_seqlen: from 0, not falling, at most T. It
// costs O(S), and a wait for the device where cu_seqlens is on one.
std::vector<int64_t> host_borders(const Inputs& inputs);

// The dtype of the arithmetic: float32 for half precision.
inline at::ScalarType compute_type(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// A new seed for the dropout of one call, drawn from torch's generator for the device of q, so
// that torch.manual_seed decides and torch's checkpointing replays.
at::Tensor draw_seed(const Inputs& inputs);

Forward cpu_forward(const Inputs& inputs);
Gradients cpu_backward(const Inputs& inputs, const Saved& saved);
Forward cuda_forward(const Inputs& inputs);
Gradients cuda_backward(const Inputs& inputs, const Saved& saved);
Forward portable_forward(const Inputs& inputs);
Gradients portable_backward(const Inputs& inputs, const Saved& saved);

} // namespace multipack::attention
