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
// backward, computes all of each; it also takes one length a call. The arithmetic is in float32
// (float64 for float64), to which the copies of half precision are widened. tiles.h has the
// products and the softmax.
//
// Tasks are dealt out longest first to torch's own threads. Forward, a task is a few blocks of
// queries; backward it is a segment and key head, since its query heads add to the same gradient.
// So one long segment keeps H_kv threads busy, and many short ones all of them. Sums are made in
// one order whatever the number of threads and whoever takes a task: the same inputs give the same
// bits.
//
// Each thread works on copies of what it reads again and again: rows of one head lie far apart in
// (T, H, D), where they are in each other's way in the cache (a tenth of the time). Beside the
// results it needs a few tiles forward, and backward the keys, values and their gradients of one
// segment and head.
#include "multipack/cpp/attention.h"
#include "multipack/cpp/tiles.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

namespace multipack::attention {
namespace {

// A tile. Milliseconds forward + backward for 4096 tokens, 8 heads of 64, on one core (AVX-512):
//
//   queries x keys   8 segments   64 segments   1 segment
//   64 x 64            15 + 31       6 + 12      88 + 191
//   64 x 96            16 + 33       7 + 12      93 + 195
//   64 x 128           16 + 32       7 + 12      89 + 192
constexpr int64_t block_q = 64;
constexpr int64_t block_k = 64;

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

// Memory that grows to what was last asked for; what it held is lost. It begins where a cache line
// does, so that no vector lies across two.
template <typename T>
class Buffer {
 public:
  T* of(int64_t size) {
    if (size > size_) {
      data_.reset(new (line) T[size]);
      size_ = size;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t line{64};
  struct Free {
    void operator()(T* data) const { operator delete[](data, line); }
  };

  std::unique_ptr<T[], Free> data_;
  int64_t size_ = 0;
};

// A tensor (T, heads, D) by pointer: head by head, rows of D numbers.
template <typename S>
struct Heads {
  S* data;
  int64_t stride_token, stride_head;

  explicit Heads(const at::Tensor& x)
      : data(const_cast<S*>(x.const_data_ptr<std::remove_const_t<S>>())),
        stride_token(x.stride(0)),
        stride_head(x.stride(1)) {}

  Rows<S> rows(int64_t token, int64_t head) const {
    return {data + token * stride_token + head * stride_head, stride_token};
  }
};

// Rows in the dtype of the arithmetic, one behind the other and `width` long, with zeros at the
// ends.
template <typename S, typename T>
Rows<T> packed(Rows<const S> x, int64_t count, int64_t size, int64_t width, Buffer<T>& buffer) {
  const Rows<T> into{buffer.of(count * width), width};
  for (int64_t i = 0; i < count; ++i) {
    std::fill(std::copy_n(x.row(i), size, into.row(i)), into.row(i + 1), T(0));
  }
  return into;
}

template <typename T>
Rows<T> zeros(int64_t count, int64_t width, Buffer<T>& buffer) {
  const Rows<T> into{buffer.of(count * width), width};
  std::fill_n(into.data, count * width, T(0));
  return into;
}

template <typename S, typename T>
void unpack(Rows<const T> sums, int64_t count, int64_t size, Rows<S> x) {
  for (int64_t i = 0; i < count; ++i) {
    std::copy_n(sums.row(i), size, x.row(i));
  }
}

// The scalar product, in sixteen sums that the compiler makes at once.
template <typename S, typename T>
T dot(const T* x, const S* y, int64_t size) {
  constexpr int64_t sums = 16;
  T parts[sums] = {};
  int64_t d = 0;
  for (; d + sums <= size; d += sums) {
    for (int64_t i = 0; i < sums; ++i) {
      parts[i] += x[d + i] * static_cast<T>(y[d + i]);
    }
  }
  for (; d < size; ++d) {
    parts[0] += x[d] * static_cast<T>(y[d]);
  }
  return std::accumulate(parts, parts + sums, T(0));
}

// Rows as the columns of a block of queries, times `factor`, with zeros for the queries that fill
// up the last vector.
template <typename S, typename T>
void write_columns(Rows<const S> x, int64_t count, int64_t size, T factor, Rows<T> into) {
  for (int64_t i = 0; i < count; ++i) {
    const S* const row = x.row(i);
    for (int64_t d = 0; d < size; ++d) {
      into.row(d)[i] = static_cast<T>(row[d]) * factor;
    }
  }
  for (int64_t d = 0; d < size; ++d) {
    std::fill(into.row(d) + count, into.row(d) + whole_vectors<T>(count), T(0));
  }
}

// Queries and keys, counted in their segment. Its scores have a row for each key and a column for
// each query.
struct Tile {
  int64_t q0, q1, j0, j1;

  int64_t queries() const { return q1 - q0; }
  int64_t keys() const { return j1 - j0; }
};

// Which keys of a segment a query may see.
struct Sight {
  int64_t length; // of the segment
  int64_t window;
  bool causal;

  int64_t first(int64_t query) const { return std::max<int64_t>(0, query - window + 1); }
  int64_t end(int64_t query) const { return causal ? query + 1 : std::min(length, query + window); }

  // Whether there is a pair in a tile.
  bool any(const Tile& tile) const {
    return first(tile.q0) < tile.j1 && tile.j0 < end(tile.q1 - 1);
  }

  // Sets to `value` what is no pair in the scores of a tile.
  template <typename T>
  void hide(Rows<T> scores, const Tile& tile, T value) const {
    for (int64_t key = tile.j0; key < tile.j1; ++key) {
      const int64_t from = std::clamp(causal ? key : key - window + 1, tile.q0, tile.q1);
      const int64_t to = std::clamp(key + window, from, tile.q1);
      T* const row = scores.row(key - tile.j0);
      std::fill(row, row + (from - tile.q0), value);
      std::fill(row + (to - tile.q0), row + (tile.q1 - tile.q0), value);
    }
  }
};

// Dropout by a generator that counts: the number for a query and key is the same forward and
// backward, in whatever tiles they are computed. Philox gives four numbers for each count.
class Dropout {
 public:
  Dropout(const Inputs& in, const at::Tensor& random) : p_(in.dropout_p), tokens_(in.tokens()) {
    if (active()) {
      seed_ = static_cast<uint64_t>(random.const_data_ptr<int64_t>()[0]);
    }
  }

  bool active() const { return p_ > 0; }

  // Writes what the weights of a tile are multiplied by: 0 where they are dropped and 1 / (1 - p)
  // where they are kept. The segment begins at token `start`.
  template <typename T>
  void draw(const Tile& tile, const Sight& sight, int64_t head, int64_t start, Rows<T> kept) const {
    const double bound = p_ * 4294967296.0; // 2^32
    const T factor = static_cast<T>(1 / (1 - p_));
    std::fill_n(kept.data, tile.keys() * kept.stride, T(0));
    for (int64_t query = tile.q0; query < tile.q1; ++query) {
      const int64_t from = std::max(sight.first(query), tile.j0);
      const int64_t to = std::min(sight.end(query), tile.j1);
      at::Philox4_32 numbers(
          seed_,
          static_cast<uint64_t>(head * tokens_ + start + query),
          static_cast<uint64_t>(from / 4));
      for (int64_t i = 0; i < from % 4; ++i) {
        numbers();
      }
      for (int64_t key = from; key < to; ++key) {
        kept.row(key - tile.j0)[query - tile.q0] = numbers() < bound ? T(0) : factor;
      }
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

// x *= y, for the scores of a tile.
template <typename T>
void scale_tile(Rows<T> x, Rows<const T> y, const Tile& tile) {
  for (int64_t i = 0; i < tile.keys(); ++i) {
    std::transform(x.row(i), x.row(i) + tile.queries(), y.row(i), x.row(i), std::multiplies<T>());
  }
}

// The dtype of the arithmetic.
template <typename S>
using Wide = std::conditional_t<std::is_same_v<S, double>, double, float>;

// Queries of a forward task, which share its copies of keys and values.
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
    Buffer<T> q, k, v, scores, kept, sums, most, total, shrink;
  };

  void chunk(const Chunk& c, int64_t head, Scratch& scratch) {
    const int64_t size = in_.head_size(), width = whole_vectors<T>(size);
    const int64_t kv_head = head / in_.heads_per_kv(), count = c.to - c.from;
    const Sight sight{c.length, in_.window, in_.causal};
    // Block after block of columns.
    const Rows<T> q{scratch.q.of(chunk_queries * size), block_q};
    const Rows<T> scores{scratch.scores.of(block_k * block_q), block_q};
    const Rows<T> kept{scratch.kept.of(block_k * block_q), block_q};
    const Rows<T> sums = zeros(count, width, scratch.sums);
    T* const most = scratch.most.of(chunk_queries);
    T* const total = scratch.total.of(chunk_queries);
    T* const shrink = scratch.shrink.of(block_q);
    std::fill_n(most, chunk_queries, -std::numeric_limits<T>::infinity());
    std::fill_n(total, chunk_queries, T(0));
    for (int64_t block = 0; block < count; block += block_q) {
      const int64_t queries = std::min(block_q, count - block);
      const Rows<const S> rows = q_.rows(c.start + c.from + block, head);
      write_columns(rows, queries, size, T(in_.scale), q.from(block / block_q * size));
    }
    const int64_t end = sight.end(c.to - 1);
    for (int64_t j0 = sight.first(c.from); j0 < end; j0 += block_k) {
      const int64_t j1 = std::min(j0 + block_k, end), keys = j1 - j0;
      const auto k = packed(k_.rows(c.start + j0, kv_head), keys, size, width, scratch.k);
      const auto v = packed(v_.rows(c.start + j0, kv_head), keys, size, width, scratch.v);
      for (int64_t block = 0; block < count; block += block_q) {
        const Tile tile{c.from + block, std::min(c.from + block + block_q, c.to), j0, j1};
        if (!sight.any(tile)) {
          continue;
        }
        const int64_t queries = whole_vectors<T>(tile.queries());
        kernels_.multiply({keys, queries, size, k, q.from(block / block_q * size), scores});
        sight.hide(scores, tile, -std::numeric_limits<T>::infinity());
        kernels_.softmax({keys, queries, scores, most + block, total + block, shrink});
        if (dropout_.active()) {
          dropout_.draw(tile, sight, head, c.start, kept);
          scale_tile<T>(scores, kept, tile);
        }
        const Matrix<T> weights = Matrix<T>(scores).transposed();
        kernels_.multiply(
            {tile.queries(), width, keys, weights, v, sums.from(block), true, shrink});
      }
    }
    const Rows<S> out = out_.rows(c.start + c.from, head);
    T* const logsumexp = logsumexp_ + head * in_.tokens() + c.start + c.from;
    for (int64_t i = 0; i < count; ++i) {
      const T share = 1 / total[i];
      std::transform(sums.row(i), sums.row(i) + size, out.row(i), [=](T x) {
        return static_cast<S>(x * share);
      });
      logsumexp[i] = most[i] + std::log(total[i]);
    }
  }

  const Inputs& in_;
  Heads<const S> q_, k_, v_;
  Heads<S> out_;
  T* logsumexp_;
  Dropout dropout_;
  const Kernels<T>& kernels_ = kernels<T>();
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
  // `columns` are those of a block of queries, the others rows.
  struct Scratch {
    Buffer<T> q, k, v, grad_out, grad_q, grad_k, grad_v;
    Buffer<T> q_columns, grad_out_columns, weights, grads, kept, logsumexp, delta;
  };

  // Keys, values and their gradients of a segment.
  struct Segment {
    Chunk chunk;
    Rows<const T> k, v;
    Rows<T> grad_k, grad_v;
  };

  void segment(const Chunk& c, int64_t kv_head, Scratch& scratch) {
    const int64_t size = in_.head_size(), width = whole_vectors<T>(size);
    const int64_t group = in_.heads_per_kv();
    const Segment segment{
        c,
        packed(k_.rows(c.start, kv_head), c.length, size, width, scratch.k),
        packed(v_.rows(c.start, kv_head), c.length, size, width, scratch.v),
        zeros(c.length, width, scratch.grad_k),
        zeros(c.length, width, scratch.grad_v)};
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t q0 = 0; q0 < c.length; q0 += block_q) {
        block(segment, head, q0, std::min(q0 + block_q, c.length), scratch);
      }
    }
    unpack<S, T>(segment.grad_k, c.length, size, grad_k_.rows(c.start, kv_head));
    unpack<S, T>(segment.grad_v, c.length, size, grad_v_.rows(c.start, kv_head));
  }

  void block(const Segment& x, int64_t head, int64_t q0, int64_t q1, Scratch& scratch) {
    const int64_t size = in_.head_size(), width = whole_vectors<T>(size);
    const int64_t count = q1 - q0, queries = whole_vectors<T>(count), token = x.chunk.start + q0;
    const Sight sight{x.chunk.length, in_.window, in_.causal};
    const T scale(in_.scale);
    const auto q_rows = q_.rows(token, head);
    const auto q = packed(q_rows, count, size, width, scratch.q);
    const Rows<T> q_columns{scratch.q_columns.of(size * block_q), block_q};
    write_columns(q_rows, count, size, scale, q_columns);
    const auto grad_rows = grad_out_.rows(token, head);
    const auto grad_out = packed(grad_rows, count, size, width, scratch.grad_out);
    const Rows<T> grad_columns{scratch.grad_out_columns.of(size * block_q), block_q};
    write_columns(grad_rows, count, size, T(1), grad_columns);
    const auto grad_q = zeros(count, width, scratch.grad_q);
    const Rows<const S> out = out_.rows(token, head);
    T* const logsumexp = scratch.logsumexp.of(block_q);
    T* const delta = scratch.delta.of(block_q);
    std::fill_n(logsumexp, queries, T(0));
    std::fill_n(delta, queries, T(0));
    std::copy_n(logsumexp_ + head * in_.tokens() + token, count, logsumexp);
    for (int64_t i = 0; i < count; ++i) {
      delta[i] = dot(grad_out.row(i), out.row(i), size);
    }
    // The weights, and their gradient, which becomes that of the scores.
    const Rows<T> p{scratch.weights.of(block_k * block_q), block_q};
    const Rows<T> ds{scratch.grads.of(block_k * block_q), block_q};
    const Rows<T> kept{scratch.kept.of(block_k * block_q), block_q};
    const int64_t first = sight.first(q0), end = sight.end(q1 - 1);
    for (int64_t j0 = first; j0 < end; j0 += block_k) {
      const Tile tile{q0, q1, j0, std::min(j0 + block_k, end)};
      const int64_t keys = tile.keys();
      kernels_.multiply({keys, queries, size, x.k.from(j0), q_columns, p});
      kernels_.multiply({keys, queries, size, x.v.from(j0), grad_columns, ds});
      if (dropout_.active()) {
        dropout_.draw(tile, sight, head, x.chunk.start, kept);
        scale_tile<T>(ds, kept, tile);
      }
      kernels_.scores_gradient({keys, queries, p, ds, logsumexp, delta, scale});
      if (dropout_.active()) {
        scale_tile<T>(p, kept, tile);
      }
      sight.hide(p, tile, T(0));
      sight.hide(ds, tile, T(0));
      kernels_.multiply({keys, width, count, p, grad_out, x.grad_v.from(j0), true});
      kernels_.multiply({keys, width, count, ds, q, x.grad_k.from(j0), true});
      const Matrix<T> by_query = Matrix<T>(ds).transposed();
      kernels_.multiply({count, width, keys, by_query, x.k.from(j0), grad_q, true});
    }
    unpack<S, T>(grad_q, count, size, grad_q_.rows(token, head));
  }

  const Inputs& in_;
  Heads<const S> q_, k_, v_, out_, grad_out_;
  Heads<S> grad_q_, grad_k_, grad_v_;
  const T* logsumexp_;
  Dropout dropout_;
  const Kernels<T>& kernels_ = kernels<T>();
};

} // namespace

Forward cpu_forward(const Inputs& in) {
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

Gradients cpu_backward(const Inputs& in, const Saved& saved) {
  const std::vector<int64_t> borders = host_borders(in);
  at::Tensor grad_q = at::empty(in.q.sizes(), in.q.options());
  at::Tensor grad_k = at::empty(in.k.sizes(), in.k.options());
  at::Tensor grad_v = at::empty(in.v.sizes(), in.v.options());
  for (at::Tensor* grad : {&grad_q, &grad_k, &grad_v}) {
    grad->narrow(0, borders.back(), in.tokens() - borders.back()).zero_();
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, in.q.scalar_type(), "multipack::attention", [&] {
        BackwardPass<scalar_t>(in, saved, grad_q, grad_k, grad_v).run(borders);
      });
  return {grad_q, grad_k, grad_v};
}

} // namespace multipack::attention
