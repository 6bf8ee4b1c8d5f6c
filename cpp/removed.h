// What torch removed in 2.14 and torch-sys 0.26, written for 2.13, still names: each function calls
// the one that took its place. libtorch.py forces this header into every C++ file there; multipack
// calls none of them.
#pragma once

#if __has_include(<ATen/ops/linalg_qr.h>)
#include <ATen/ops/linalg_cholesky.h>
#include <ATen/ops/linalg_qr.h>

#include <tuple>

namespace at {

inline Tensor cholesky(const Tensor& self, bool upper) {
  return linalg_cholesky(self, upper);
}

inline Tensor& cholesky_out(Tensor& out, const Tensor& self, bool upper) {
  return linalg_cholesky_out(out, self, upper);
}

inline std::tuple<Tensor, Tensor> qr(const Tensor& self, bool some) {
  return linalg_qr(self, some ? "reduced" : "complete");
}

inline std::tuple<Tensor&, Tensor&> qr_out(Tensor& q, Tensor& r, const Tensor& self, bool some) {
  return linalg_qr_out(q, r, self, some ? "reduced" : "complete");
}

} // namespace at
#endif
