// Small matrices in vector instructions: the products and the softmax that attention_cpu.cpp makes
// of one tile of queries and keys.
//
// The products are our own and not those of the BLAS that torch links, for two reasons. A tile lies
// in the first-level cache and needs none of the copying that a BLAS does to put large matrices
// there: float32, 64 x 64 x 64, on one thread of an EPYC with AVX-512, 275 GFLOP/s beside the 104
// of MKL's sgemm. And every element is one sum over k in ascending order, so that one machine
// always gives the same bits: MKL gave others in 6 of 150 runs of a training beside five such runs.
//
// A product keeps `rows` by `vectors` vectors of c in registers while it goes through k: each step
// loads that many vectors of b and that many numbers of a (the outer product of Goto and van de
// Geijn, https://doi.org/10.1145/1356052.1356053). Scores are stored with the keys as rows and the
// queries side by side, `lanes` to a vector: a softmax over keys then goes down the columns, for
// all lanes at once, and adds nothing across a vector.
//
// Everything is compiled for each generation of vector units, and the one that torch uses is taken
// (ATEN_CPU_CAPABILITY chooses another).
#pragma once

#include <ATen/Version.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

namespace multipack::attention {

// Rows of memory, `stride` numbers apart.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;

  T* row(int64_t i) const { return data + i * stride; }
  Rows from(int64_t i) const { return {row(i), stride}; }
  operator Rows<const T>() const { return {data, stride}; }
};

// A matrix to be read: element (i, j) is at data[i * row + j * column].
template <typename T>
struct Matrix {
  const T* data;
  int64_t row, column;

  Matrix(Rows<const T> x) : data(x.data), row(x.stride), column(1) {}
  Matrix(Rows<T> x) : Matrix(Rows<const T>(x)) {}
  Matrix transposed() const {
    Matrix other = *this;
    std::swap(other.row, other.column);
    return other;
  }
};

// Numbers in 64 bytes, the longest vector. All that is read or written in vectors begins where one
// may, at a multiple of 64 bytes, and is as long as whole ones; so are the rows of b and c.
template <typename T>
constexpr int64_t lanes = 64 / sizeof(T);

template <typename T>
constexpr int64_t whole_vectors(int64_t count) {
  return (count + lanes<T> - 1) / lanes<T> * lanes<T>;
}

// c = a b + what was there, (m, k) times (k, n): nothing, c, or c with row i times factors[i].
template <typename T>
struct Product {
  int64_t m, n, k; // n in whole vectors
  Matrix<T> a;
  Rows<const T> b;
  Rows<T> c;
  bool add = false;
  const T* factors = nullptr;
};

// A tile of scores, key by key, and what the softmax carries along for each query.
template <typename T>
struct Softmax {
  int64_t keys, queries; // queries in whole vectors
  Rows<T> scores;        // -inf for a pair that does not see each other; becomes exp(s - most)
  T* most;               // the largest score so far, -inf before the first
  T* total;              // the sum of exp(s - most) so far
  T* shrink;             // becomes exp(most before - most now): for sums made with the old one
};

// A tile of the backward pass, key by key.
template <typename T>
struct ScoresGradient {
  int64_t keys, queries; // queries in whole vectors
  Rows<T> weights;       // scores, become p = exp(s - logsumexp)
  Rows<T> grads;         // of the weights, become those of the scores: p (grad - delta) scale
  const T* logsumexp;
  const T* delta;
  T scale;
};

template <typename T>
struct Kernels {
  void (*multiply)(const Product<T>&);
  void (*softmax)(const Softmax<T>&);
  void (*scores_gradient)(const ScoresGradient<T>&);
};

#define MULTIPACK_INLINE inline __attribute__((always_inline))

// What is compiled for each generation: vectors of `bytes`, and blocks of a product that are
// `vectors` of them wide.
template <typename T, int bytes, int vectors>
struct Tiles {
  typedef T Vector __attribute__((vector_size(bytes), may_alias));
  static constexpr int64_t width = bytes / sizeof(T);
  static constexpr int rows = 4;

  static MULTIPACK_INLINE Vector& at(T* x) { return *reinterpret_cast<Vector*>(x); }
  static MULTIPACK_INLINE const Vector& at(const T* x) {
    return *reinterpret_cast<const Vector*>(x);
  }

  static MULTIPACK_INLINE void multiply(const Product<T>& x) {
    int64_t j = 0;
    for (; j + vectors * width <= x.n; j += vectors * width) {
      columns<vectors>(x, j);
    }
    for (; j < x.n; j += width) {
      columns<1>(x, j);
    }
  }

  static MULTIPACK_INLINE void softmax(const Softmax<T>& x) {
    for (int64_t i = 0; i < x.queries; i += width) {
      const Vector before = at(x.most + i);
      Vector most = before;
      for (int64_t j = 0; j < x.keys; ++j) {
        const Vector& s = at(x.scores.row(j) + i);
        most = s > most ? s : most;
      }
      // Where all scores so far are -inf any number will do, since exp(-inf - 0) = 0.
      const Vector shift = most == -infinity ? Vector{} : most;
      Vector shrink = before - shift;
      exp(shrink);
      Vector sum = at(x.total + i) * shrink;
      for (int64_t j = 0; j < x.keys; ++j) {
        Vector p = at(x.scores.row(j) + i) - shift;
        exp(p);
        at(x.scores.row(j) + i) = p;
        sum += p;
      }
      at(x.most + i) = most;
      at(x.total + i) = sum;
      at(x.shrink + i) = shrink;
    }
  }

  static MULTIPACK_INLINE void scores_gradient(const ScoresGradient<T>& x) {
    for (int64_t j = 0; j < x.keys; ++j) {
      for (int64_t i = 0; i < x.queries; i += width) {
        Vector p = at(x.weights.row(j) + i) - at(x.logsumexp + i);
        exp(p);
        at(x.weights.row(j) + i) = p;
        Vector& grad = at(x.grads.row(j) + i);
        grad = p * (grad - at(x.delta + i)) * x.scale;
      }
    }
  }

 private:
  static constexpr T infinity = std::numeric_limits<T>::infinity();

  template <int count>
  static MULTIPACK_INLINE void columns(const Product<T>& x, int64_t j) {
    int64_t i = 0;
    for (; i + rows <= x.m; i += rows) {
      block<rows, count>(x, i, j);
    }
    for (; i < x.m; ++i) {
      block<1, count>(x, i, j);
    }
  }

  template <int height, int count>
  static MULTIPACK_INLINE void block(const Product<T>& x, int64_t i, int64_t j) {
    Vector sums[height][count];
    for (int r = 0; r < height; ++r) {
      for (int v = 0; v < count; ++v) {
        const T* const c = x.c.row(i + r) + j + v * width;
        sums[r][v] = x.factors ? x.factors[i + r] * at(c) : x.add ? at(c) : Vector{};
      }
    }
    const T* const a = x.a.data + i * x.a.row;
    for (int64_t p = 0; p < x.k; ++p) {
      Vector b[count];
      for (int v = 0; v < count; ++v) {
        b[v] = at(x.b.row(p) + j + v * width);
      }
      for (int r = 0; r < height; ++r) {
        const T factor = a[r * x.a.row + p * x.a.column];
        for (int v = 0; v < count; ++v) {
          sums[r][v] += factor * b[v];
        }
      }
    }
    for (int r = 0; r < height; ++r) {
      for (int v = 0; v < count; ++v) {
        at(x.c.row(i + r) + j + v * width) = sums[r][v];
      }
    }
  }

  // x = exp(x) for x <= 0 or little more, within 2 units in the last place; 0 below -87, where
  // float32 is about to run out of normal numbers. 2^n times a polynomial for the rest, which is at
  // most half of log 2 away from 0 (Cephes' coefficients). In float64, the library's.
  static MULTIPACK_INLINE void exp(Vector& x) {
    if constexpr (std::is_same_v<T, double>) {
      for (int i = 0; i < width; ++i) {
        x[i] = std::exp(x[i]);
      }
    } else {
      typedef uint32_t Bits __attribute__((vector_size(bytes)));
      const Vector shifted = x * 1.44269504f + 12582912.0f; // 1.5 * 2^23: rounds to an integer
      const Vector n = shifted - 12582912.0f;
      const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
      Vector p = 1.9875691500e-4f * r + 1.3981999507e-3f;
      p = p * r + 8.3334519073e-3f;
      p = p * r + 4.1665795894e-2f;
      p = p * r + 1.6666665459e-1f;
      p = p * r + 5.0000001201e-1f;
      p = p * r * r + r + 1.0f;
      // The integer is in the last bits of `shifted`; it moves to the exponent.
      const Bits power = (__builtin_bit_cast(Bits, shifted) << 23) + 0x3F800000;
      x = x < -87.0f ? Vector{} : p * __builtin_bit_cast(Vector, power);
    }
  }
};

// The kernels under a name, compiled with the instructions `TARGET`.
#define MULTIPACK_KERNELS(NAME, TARGET, BYTES, VECTORS)                                          \
  template <typename T>                                                                          \
  struct NAME {                                                                                  \
    using Code = Tiles<T, BYTES, VECTORS>;                                                       \
    TARGET static void multiply(const Product<T>& x) { Code::multiply(x); }                      \
    TARGET static void softmax(const Softmax<T>& x) { Code::softmax(x); }                        \
    TARGET static void scores_gradient(const ScoresGradient<T>& x) { Code::scores_gradient(x); } \
    static constexpr Kernels<T> all{multiply, softmax, scores_gradient};                         \
  }

// AVX-512 has 32 registers for a block and b, AVX2 and SSE 16.
#ifdef __x86_64__
MULTIPACK_KERNELS(
    Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), 64, 4);
MULTIPACK_KERNELS(Avx2, __attribute__((target("avx2,fma"))), 32, 2);
#endif
MULTIPACK_KERNELS(Baseline, , 16, 2);

template <typename T>
const Kernels<T>& kernels() {
  static const Kernels<T>& chosen = []() -> const Kernels<T>& {
    const std::string capability = at::get_cpu_capability();
#ifdef __x86_64__
    if (capability == "AVX512") {
      return Avx512<T>::all;
    }
    if (capability == "AVX2") {
      return Avx2<T>::all;
    }
#endif
    return Baseline<T>::all;
  }();
  return chosen;
}

#undef MULTIPACK_KERNELS
#undef MULTIPACK_INLINE

} // namespace multipack::attention
