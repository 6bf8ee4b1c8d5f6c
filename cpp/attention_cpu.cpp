// Attention on the CPU: a fused kernel over segments, heads and blocks of queries.
//
// The idea is that of FlashAttention (Dao et al., https://arxiv.org/abs/2205.14135): scores are
// made tile by tile and never stored, and what the softmax needs of a row is carried along.
//
//   forward, for each segment, query head and block of queries, tile after tile of keys:
//     s = scale * q k^T
//     m' = max(m, max s);  p = exp(s - m');  c = exp(m - m')
//     sum = c * sum + sum p;  acc = c * acc + p v;  m = m'
//   out = acc / sum;  logsumexp = m + log(sum)
//
//   backward, for each segment and key head, its query heads, blocks and tiles:
//     p = exp(scale * q k^T - logsumexp);  ds = scale * p * (grad_out v^T - rowsum(grad_out * out))
//     grad_v += p^T grad_out;  grad_q += ds k;  grad_k += ds^T q
//
// Tiles that no query of a block may see are not visited, so a causal segment costs little more
// than half and a window costs its width. torch's own CPU kernel has tiles of 512 keys and, going
// backward, computes all of each; it also takes one length a call. Both products of a tile go to
// the BLAS that torch links, in float32 (float64 for float64): half precision is widened row block
// by row block, which is linear work next to the products.
//
// Tasks are dealt out longest first to torch's own threads. Forward, a task is a block of queries;
// backward it is a segment and key head, since its query heads add to the same gradient. So one
// long segment keeps H_kv threads busy, and many short ones all of them. Sums are made in one order
// whatever the number of threads; only what BLAS makes of that number can change the last digits
// (MKL takes another kernel for head sizes such as 80).
//
// Beside the results it needs a few tiles for each thread, and for half precision the keys, values
// and their gradients of the segment at hand in float32.
#include "multipack/cpp/attention.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

// BLAS as libtorch_cpu exports it: Fortran's, column by column, every argument by address.
extern "C" {
void sgemm_(
    const char* transa,
    const char* transb,
    const int* m,
    const int* n,
    const int* k,
    const float* alpha,
    const float* a,
    const int* lda,
    const float* b,
    const int* ldb,
    const float* beta,
    float* c,
    const int* ldc);
void dgemm_(
    const char* transa,
    const char* transb,
    const int* m,
    const int* n,
    const int* k,
    const double* alpha,
    const double* a,
    const int* lda,
    const double* b,
    const int* ldb,
    const double* beta,
    double* c,
    const int* ldc);
}

// One copy of a function for each generation of vector units, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__linux__)
#define MULTIPACK_VECTORISED \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MULTIPACK_VECTORISED
#endif

namespace multipack::attention {
namespace {

// A tile. Milliseconds forward + backward for 4096 tokens, 8 heads of 64, on one core (AVX-512):
//
//   queries x keys   8 segments   64 segments   1 segment
//   64 x 128           31 + 74       12 + 23    204 + 428
//   64 x 256           31 + 75       12 + 24    196 + 427
//   64 x 512           32 + 71       11 + 30    189 + 415
//   128 x 256          31 + 77       14 + 26    181 + 397
constexpr int64_t block_q = 64;
constexpr int64_t block_k = 256;

// Rows of memory, `stride` numbers apart.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;

  T* row(int64_t i) const { return data + i * stride; }
  Rows from(int64_t i) const { return {row(i), stride}; }
  operator Rows<const T>() const { return {data, stride}; }
};

int blas_int(int64_t x) {
  return static_cast<int>(x);
}

// c = alpha * op(a) op(b) + beta * c for matrices stored row by row, (m, k) times (k, n). To BLAS
// they are their own transposes, so the factors change places.
template <typename T>
void multiply(
    bool transpose_a,
    bool transpose_b,
    int64_t m,
    int64_t n,
    int64_t k,
    T alpha,
    Rows<const T> a,
    Rows<const T> b,
    T beta,
    Rows<T> c) {
  const char ta = transpose_a ? 'T' : 'N', tb = transpose_b ? 'T' : 'N';
  const int mm = blas_int(m), nn = blas_int(n), kk = blas_int(k);
  const int lda = blas_int(a.stride), ldb = blas_int(b.stride), ldc = blas_int(c.stride);
  if constexpr (std::is_same_v<T, float>) {
    sgemm_(&tb, &ta, &nn, &mm, &kk, &alpha, b.data, &ldb, a.data, &lda, &beta, c.data, &ldc);
  } else {
    dgemm_(&tb, &ta, &nn, &mm, &kk, &alpha, b.data, &ldb, a.data, &lda, &beta, c.data, &ldc);
  }
}

// exp for x <= 0 or little more, within 2 units in the last place; below -87 it stays at the
// smallest normal number, where float32 has little left. Not the library's, because a loop over
// this one becomes vector instructions. 2^n times a polynomial for the rest, which is at most half
// of log 2 away from 0 (Cephes' coefficients).
inline float exp_of(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f; // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

inline double exp_of(double x) {
  return std::exp(x);
}

template <typename T>
inline T largest_of(const T* x, int64_t n) {
  T most = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) {
    most = x[i] > most ? x[i] : most;
  }
  return most;
}

// x = exp(x - shift), and the sum.
template <typename T>
inline T exp_and_sum_of(T* x, int64_t n, T shift) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    x[i] = exp_of(x[i] - shift);
    sum += x[i];
  }
  return sum;
}

// s = exp(s - logsumexp): the softmax made once more.
template <typename T>
inline void softmax_again_of(T* s, int64_t n, T logsumexp) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    s[i] = exp_of(s[i] - logsumexp);
  }
}

// dp = p * (dp - delta) * scale: from the gradient of the weights to that of the scores.
template <typename T>
inline void scores_gradient_of(const T* p, T* dp, int64_t n, T delta, T scale) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dp[i] = p[i] * (dp[i] - delta) * scale;
  }
}

MULTIPACK_VECTORISED float largest_f32(const float* x, int64_t n) {
  return largest_of(x, n);
}

MULTIPACK_VECTORISED float exp_and_sum_f32(float* x, int64_t n, float shift) {
  return exp_and_sum_of(x, n, shift);
}

MULTIPACK_VECTORISED void softmax_again_f32(float* s, int64_t n, float logsumexp) {
  softmax_again_of(s, n, logsumexp);
}

MULTIPACK_VECTORISED void scores_gradient_f32(
    const float* p, float* dp, int64_t n, float delta, float scale) {
  scores_gradient_of(p, dp, n, delta, scale);
}

// The loops by dtype: float32 in vector instructions, float64 as the compiler likes.
inline float largest(const float* x, int64_t n) {
  return largest_f32(x, n);
}
inline double largest(const double* x, int64_t n) {
  return largest_of(x, n);
}
inline float exp_and_sum(float* x, int64_t n, float shift) {
  return exp_and_sum_f32(x, n, shift);
}
inline double exp_and_sum(double* x, int64_t n, double shift) {
  return exp_and_sum_of(x, n, shift);
}
inline void softmax_again(float* s, int64_t n, float logsumexp) {
  softmax_again_f32(s, n, logsumexp);
}
inline void softmax_again(double* s, int64_t n, double logsumexp) {
  softmax_again_of(s, n, logsumexp);
}
inline void scores_gradient(const float* p, float* dp, int64_t n, float delta, float scale) {
  scores_gradient_f32(p, dp, n, delta, scale);
}
inline void scores_gradient(const double* p, double* dp, int64_t n, double delta, double scale) {
  scores_gradient_of(p, dp, n, delta, scale);
}

// Calls work(task, scratch) for every task below `count`, each thread with a scratch of its own and
// taking the next task when it is done with one.
//
// The threads are torch's: a TensorIterator over one byte for each thread hands one to each.
// at::parallel_for would be serial here, because it is compiled where it is called and this library
// is compiled without OpenMP, so as not to bring a second thread pool along.
template <typename Scratch, typename Work>
void run_tasks(int64_t count, Work&& work) {
  std::atomic<int64_t> next{0};
  const auto take_tasks = [&] {
    Scratch scratch;
    for (int64_t task = next++; task < count; task = next++) {
      work(task, scratch);
    }
  };
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  if (threads <= 1) {
    take_tasks();
    return;
  }
  at::Tensor bytes = at::empty({threads}, at::kByte);
  at::TensorIterator::nullary_op(bytes).for_each(
      [&](char**, const int64_t*, int64_t, int64_t) { take_tasks(); }, /*grain_size=*/1);
}

// Memory that grows to what was last asked for; what it held is lost.
template <typename T>
class Buffer {
 public:
  T* of(int64_t size) {
    if (size > size_) {
      data_.reset(new T[size]);
      size_ = size;
    }
    return data_.get();
  }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

// A tensor (T, heads, D) by pointer: head by head, rows of D numbers.
template <typename S>
struct Heads {
  S* data;
  int64_t stride_token, stride_head;

  explicit Heads(const at::Tensor& x)
      : data(const_cast<S*>(x.const_data_ptr<std::remove_const_t<S>>())),
        // BLAS wants rows that are at least as far apart as they are long, one row or many.
        stride_token(std::max(x.stride(0), x.size(2))),
        stride_head(x.stride(1)) {}

  Rows<S> rows(int64_t token, int64_t head) const {
    return {data + token * stride_token + head * stride_head, stride_token};
  }
};

// The rows themselves where they are in the dtype of the arithmetic, and a widened copy otherwise.
template <typename S, typename T>
Rows<const T> widened(Rows<const S> x, int64_t count, int64_t size, Buffer<T>& buffer) {
  if constexpr (std::is_same_v<S, T>) {
    return x;
  } else {
    T* const into = buffer.of(count * size);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(x.row(i), size, into + i * size);
    }
    return {into, size};
  }
}

// Where sums go that end in `x`: there, or in zeros that round_into will carry there.
template <typename S, typename T>
Rows<T> accumulator(Rows<S> x, int64_t count, int64_t size, Buffer<T>& buffer) {
  if constexpr (std::is_same_v<S, T>) {
    return x;
  } else {
    T* const into = buffer.of(count * size);
    std::fill_n(into, count * size, T(0));
    return {into, size};
  }
}

template <typename S, typename T>
void round_into(Rows<S> x, Rows<T> sums, int64_t count, int64_t size) {
  if constexpr (!std::is_same_v<S, T>) {
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(sums.row(i), size, x.row(i));
    }
  }
}

// Which keys of a segment a query may see.
struct Sight {
  int64_t length; // of the segment
  int64_t window;
  bool causal;

  int64_t first(int64_t query) const { return std::max<int64_t>(0, query - window + 1); }
  int64_t end(int64_t query) const { return causal ? query + 1 : std::min(length, query + window); }
};

// Dropout for one row of a tile, by a generator that counts: the number for a query and key is the
// same forward and backward, in whatever tiles they are computed. Philox gives four numbers for
// each count.
class Dropout {
 public:
  Dropout(const Inputs& in, const at::Tensor& random) : p_(in.dropout_p), tokens_(in.tokens()) {
    if (active()) {
      seed_ = static_cast<uint64_t>(random.const_data_ptr<int64_t>()[0]);
    }
  }

  bool active() const { return p_ > 0; }

  // Calls visit(i, factor) for the keys `first + i` of a query, with 0 for a dropped weight and
  // 1 / (1 - p) for a kept one. `query` counts in the batch, `first` in the segment.
  template <typename T, typename Visit>
  void for_each(int64_t head, int64_t query, int64_t first, int64_t count, Visit&& visit) const {
    at::Philox4_32 numbers(
        seed_, static_cast<uint64_t>(head * tokens_ + query), static_cast<uint64_t>(first / 4));
    for (int64_t i = 0; i < first % 4; ++i) {
      numbers();
    }
    const double bound = p_ * 4294967296.0; // 2^32
    const T kept = static_cast<T>(1 / (1 - p_));
    for (int64_t i = 0; i < count; ++i) {
      visit(i, numbers() < bound ? T(0) : kept);
    }
  }

 private:
  double p_;
  int64_t tokens_;
  uint64_t seed_ = 0;
};

// Queries `from .. to` of a segment that begins at token `start`.
struct Chunk {
  int64_t start, length, from, to;
};

// The dtype of the arithmetic.
template <typename S>
using Wide = std::conditional_t<std::is_same_v<S, double>, double, float>;

// Queries of a forward task: enough that widening the keys for it is nothing.
constexpr int64_t chunk_queries = 4 * block_q;

template <typename S>
class ForwardPass {
  using T = Wide<S>;

 public:
  ForwardPass(const Inputs& in, at::Tensor& out, at::Tensor& logsumexp, const at::Tensor& random)
      : in_(in),
        q_(in.q),
        k_(in.k),
        v_(in.v),
        out_(out),
        logsumexp_(logsumexp.mutable_data_ptr<T>()),
        dropout_(in, random) {}

  void run(const std::vector<int64_t>& borders) {
    std::vector<Chunk> chunks;
    for (size_t i = 0; i + 1 < borders.size(); ++i) {
      const int64_t start = borders[i], length = borders[i + 1] - start;
      for (int64_t from = 0; from < length; from += chunk_queries) {
        chunks.push_back({start, length, from, std::min(from + chunk_queries, length)});
      }
    }
    // The costly ones first, so that threads end together.
    const auto cost = [&](const Chunk& c) {
      const Sight sight{c.length, in_.window, in_.causal};
      return (c.to - c.from) * (sight.end(c.to - 1) - sight.first(c.from));
    };
    std::stable_sort(chunks.begin(), chunks.end(), [&](const Chunk& one, const Chunk& other) {
      return cost(one) > cost(other);
    });
    const int64_t heads = in_.heads();
    run_tasks<Scratch>(chunks.size() * heads, [&](int64_t task, Scratch& scratch) {
      chunk(chunks[task / heads], task % heads, scratch);
    });
  }

 private:
  struct Scratch {
    Buffer<T> q, k, v, scores, sums, most, total;
  };

  void chunk(const Chunk& c, int64_t head, Scratch& scratch) {
    const int64_t size = in_.head_size(), kv_head = head / in_.heads_per_kv();
    const Sight sight{c.length, in_.window, in_.causal};
    const int64_t k0 = sight.first(c.from), k1 = sight.end(c.to - 1);
    const auto k = widened<S, T>(k_.rows(c.start + k0, kv_head), k1 - k0, size, scratch.k);
    const auto v = widened<S, T>(v_.rows(c.start + k0, kv_head), k1 - k0, size, scratch.v);
    T* const scores = scratch.scores.of(block_q * block_k);
    const Rows<T> sums{scratch.sums.of(block_q * size), size};
    T* const most = scratch.most.of(block_q);
    T* const total = scratch.total.of(block_q);
    for (int64_t q0 = c.from; q0 < c.to; q0 += block_q) {
      const int64_t q1 = std::min(q0 + block_q, c.to), count = q1 - q0;
      const auto q = widened<S, T>(q_.rows(c.start + q0, head), count, size, scratch.q);
      std::fill_n(most, count, -std::numeric_limits<T>::infinity());
      std::fill_n(total, count, T(0));
      const int64_t first = sight.first(q0), end = sight.end(q1 - 1);
      for (int64_t j0 = first; j0 < end; j0 += block_k) {
        const int64_t j1 = std::min(j0 + block_k, end), keys = j1 - j0;
        const Rows<T> s{scores, keys};
        multiply<T>(false, true, count, keys, size, T(in_.scale), q, k.from(j0 - k0), T(0), s);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t query = q0 + i;
          const int64_t a = std::clamp(sight.first(query), j0, j1) - j0;
          const int64_t b = std::max(std::clamp(sight.end(query), j0, j1) - j0, a);
          T* const row = s.row(i);
          std::fill(row, row + a, T(0));
          std::fill(row + b, row + keys, T(0));
          if (a == b) {
            continue;
          }
          const T before = most[i];
          most[i] = std::max(before, largest(row + a, b - a));
          const T sum = exp_and_sum(row + a, b - a, most[i]);
          if (j0 > first && before != most[i]) {
            const T shrink = std::exp(before - most[i]);
            total[i] *= shrink;
            std::transform(
                sums.row(i), sums.row(i) + size, sums.row(i), [=](T x) { return x * shrink; });
          }
          total[i] += sum;
          if (dropout_.active()) {
            dropout_.for_each<T>(head, c.start + query, j0 + a, b - a, [&](int64_t n, T factor) {
              row[a + n] *= factor;
            });
          }
        }
        multiply<T>(false, false, count, size, keys, T(1), s, v.from(j0 - k0), T(j0 > first), sums);
      }
      const Rows<S> out = out_.rows(c.start + q0, head);
      T* const logsumexp = logsumexp_ + head * in_.tokens() + c.start + q0;
      for (int64_t i = 0; i < count; ++i) {
        const T share = 1 / total[i];
        std::transform(sums.row(i), sums.row(i) + size, out.row(i), [=](T x) {
          return static_cast<S>(x * share);
        });
        logsumexp[i] = most[i] + std::log(total[i]);
      }
    }
  }

  const Inputs& in_;
  Heads<const S> q_, k_, v_;
  Heads<S> out_;
  T* logsumexp_;
  Dropout dropout_;
};

template <typename S>
class BackwardPass {
  using T = Wide<S>;

 public:
  BackwardPass(
      const Inputs& in,
      const Saved& saved,
      at::Tensor& grad_q,
      at::Tensor& grad_k,
      at::Tensor& grad_v)
      : in_(in),
        q_(in.q),
        k_(in.k),
        v_(in.v),
        out_(saved.out),
        grad_out_(saved.grad_out),
        grad_q_(grad_q),
        grad_k_(grad_k),
        grad_v_(grad_v),
        logsumexp_(saved.logsumexp.const_data_ptr<T>()),
        dropout_(in, saved.random) {}

  void run(const std::vector<int64_t>& borders) {
    std::vector<Chunk> segments;
    for (size_t i = 0; i + 1 < borders.size(); ++i) {
      const int64_t length = borders[i + 1] - borders[i];
      if (length > 0) {
        segments.push_back({borders[i], length, 0, length});
      }
    }
    std::stable_sort(segments.begin(), segments.end(), [](const Chunk& one, const Chunk& other) {
      return one.length > other.length;
    });
    const int64_t heads = in_.kv_heads();
    run_tasks<Scratch>(segments.size() * heads, [&](int64_t task, Scratch& scratch) {
      segment(segments[task / heads], task % heads, scratch);
    });
  }

 private:
  struct Scratch {
    Buffer<T> q, k, v, grad_out, grad_q, grad_k, grad_v, scores, weights, delta;
  };

  void segment(const Chunk& c, int64_t kv_head, Scratch& scratch) {
    const int64_t size = in_.head_size(), group = in_.heads_per_kv();
    const auto k = widened<S, T>(k_.rows(c.start, kv_head), c.length, size, scratch.k);
    const auto v = widened<S, T>(v_.rows(c.start, kv_head), c.length, size, scratch.v);
    const Rows<S> into_k = grad_k_.rows(c.start, kv_head), into_v = grad_v_.rows(c.start, kv_head);
    const auto grad_k = accumulator<S, T>(into_k, c.length, size, scratch.grad_k);
    const auto grad_v = accumulator<S, T>(into_v, c.length, size, scratch.grad_v);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t q0 = 0; q0 < c.length; q0 += block_q) {
        block(c, head, q0, std::min(q0 + block_q, c.length), k, v, grad_k, grad_v, scratch);
      }
    }
    round_into<S, T>(into_k, grad_k, c.length, size);
    round_into<S, T>(into_v, grad_v, c.length, size);
  }

  void block(
      const Chunk& c,
      int64_t head,
      int64_t q0,
      int64_t q1,
      Rows<const T> k,
      Rows<const T> v,
      Rows<T> grad_k,
      Rows<T> grad_v,
      Scratch& scratch) {
    const int64_t size = in_.head_size(), count = q1 - q0, token = c.start + q0;
    const Sight sight{c.length, in_.window, in_.causal};
    const auto q = widened<S, T>(q_.rows(token, head), count, size, scratch.q);
    const auto grad_out = widened<S, T>(grad_out_.rows(token, head), count, size, scratch.grad_out);
    const Rows<S> into_q = grad_q_.rows(token, head);
    const auto grad_q = accumulator<S, T>(into_q, count, size, scratch.grad_q);
    const Rows<const S> out = out_.rows(token, head);
    T* const delta = scratch.delta.of(block_q);
    for (int64_t i = 0; i < count; ++i) {
      T sum = 0;
      for (int64_t d = 0; d < size; ++d) {
        sum += grad_out.row(i)[d] * static_cast<T>(out.row(i)[d]);
      }
      delta[i] = sum;
    }
    const T* const logsumexp = logsumexp_ + head * in_.tokens() + token;
    const int64_t first = sight.first(q0), end = sight.end(q1 - 1);
    for (int64_t j0 = first; j0 < end; j0 += block_k) {
      const int64_t j1 = std::min(j0 + block_k, end), keys = j1 - j0;
      // The weights, and their gradient, which becomes that of the scores.
      const Rows<T> p{scratch.weights.of(block_q * block_k), keys};
      const Rows<T> ds{scratch.scores.of(block_q * block_k), keys};
      multiply<T>(false, true, count, keys, size, T(in_.scale), q, k.from(j0), T(0), p);
      multiply<T>(false, true, count, keys, size, T(1), grad_out, v.from(j0), T(0), ds);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t query = q0 + i;
        const int64_t a = std::clamp(sight.first(query), j0, j1) - j0;
        const int64_t b = std::max(std::clamp(sight.end(query), j0, j1) - j0, a);
        for (T* const row : {p.row(i), ds.row(i)}) {
          std::fill(row, row + a, T(0));
          std::fill(row + b, row + keys, T(0));
        }
        T* const weights = p.row(i) + a;
        T* const grads = ds.row(i) + a;
        softmax_again(weights, b - a, logsumexp[i]);
        if (!dropout_.active()) {
          scores_gradient(weights, grads, b - a, delta[i], T(in_.scale));
          continue;
        }
        dropout_.for_each<T>(head, c.start + query, j0 + a, b - a, [&](int64_t n, T factor) {
          grads[n] = weights[n] * (grads[n] * factor - delta[i]) * T(in_.scale);
          weights[n] *= factor;
        });
      }
      multiply<T>(true, false, keys, size, count, T(1), p, grad_out, T(1), grad_v.from(j0));
      multiply<T>(true, false, keys, size, count, T(1), ds, q, T(1), grad_k.from(j0));
      multiply<T>(false, false, count, size, keys, T(1), ds, k.from(j0), T(j0 > first), grad_q);
    }
    round_into<S, T>(into_q, grad_q, count, size);
  }

  const Inputs& in_;
  Heads<const S> q_, k_, v_, out_, grad_out_;
  Heads<S> grad_q_, grad_k_, grad_v_;
  const T* logsumexp_;
  Dropout dropout_;
};

// BLAS reads rows that do not overlap.
at::Tensor apart(const at::Tensor& x) {
  return x.stride(0) >= x.size(2) || x.size(0) == 1 ? x : x.contiguous();
}

Inputs with_rows_apart(Inputs in) {
  in.q = apart(in.q);
  in.k = apart(in.k);
  in.v = apart(in.v);
  return in;
}

} // namespace

Forward cpu_forward(const Inputs& inputs) {
  const Inputs in = with_rows_apart(inputs);
  const std::vector<int64_t> borders = host_borders(in);
  at::Tensor out = at::empty(in.q.sizes(), in.q.options());
  at::Tensor logsumexp =
      at::empty({in.heads(), in.tokens()}, in.q.options().dtype(compute_type(in.q)));
  const int64_t rest = in.tokens() - borders.back();
  out.narrow(0, borders.back(), rest).zero_();
  logsumexp.narrow(1, borders.back(), rest).zero_();
  const at::Tensor random = draw_seed(in);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, in.q.scalar_type(), "multipack::attention", [&] {
        ForwardPass<scalar_t>(in, out, logsumexp, random).run(borders);
      });
  return {out, logsumexp, random};
}

Gradients cpu_backward(const Inputs& inputs, const Saved& saved) {
  const Inputs in = with_rows_apart(inputs);
  const std::vector<int64_t> borders = host_borders(in);
  const Saved rows{apart(saved.grad_out), saved.out, saved.logsumexp, saved.random};
  // Zeros, because tokens in no segment have no gradient, and because tiles add to what is there.
  at::Tensor grad_q = at::zeros(in.q.sizes(), in.q.options());
  at::Tensor grad_k = at::zeros(in.k.sizes(), in.k.options());
  at::Tensor grad_v = at::zeros(in.v.sizes(), in.v.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, in.q.scalar_type(), "multipack::attention", [&] {
        BackwardPass<scalar_t>(in, rows, grad_q, grad_k, grad_v).run(borders);
      });
  return {grad_q, grad_k, grad_v};
}

} // namespace multipack::attention
