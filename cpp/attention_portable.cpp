// Attention on every device, from torch's own operations.
//
// It serves what has no kernel: devices other than the CPU and CUDA, and on CUDA float64, windows
// that reach both ways and head sizes that the varlen kernels do not take. For the tests it is the
// plain twin of the others.
//
// Segments of one length that lie side by side are one batch, and of each batch as many queries are
// taken at a time as keep the scores within `most_scores` numbers:
//
//   scores = scale * q k^T        masked by position where causal or with a window
//   p      = exp(scores - logsumexp)
//   out    = dropout(p) v
//
// The backward makes p once more from the logsumexp instead of keeping it, so memory is O(T) and
// the work is that of the sum of length^2. The query heads that share a key head are folded into
// the rows of the product, so that keys and values are never repeated.
#include "multipack/cpp/attention.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace multipack::attention {
namespace {

// 64 MiB of scores in float32.
constexpr int64_t most_scores = int64_t{1} << 24;

// `count` segments of `length` tokens each, side by side from `start`.
struct Run {
  int64_t start, count, length;
};

std::vector<Run> runs_of(const std::vector<int64_t>& borders) {
  std::vector<Run> runs;
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    const int64_t length = borders[i + 1] - borders[i];
    if (length == 0) {
      continue;
    }
    if (!runs.empty() && runs.back().length == length) {
      ++runs.back().count;
    } else {
      runs.push_back({borders[i], 1, length});
    }
  }
  return runs;
}

// One block of queries of a run, with the keys that any of them may see.
struct Block {
  Run run;
  int64_t q0, q1; // queries, counted in the segment
  int64_t k0, k1; // keys
};

template <typename Visit>
void for_each_block(const Inputs& in, const std::vector<int64_t>& borders, Visit&& visit) {
  for (const Run& run : runs_of(borders)) {
    const int64_t scores_of_query = run.count * in.heads() * run.length;
    const int64_t step = std::max<int64_t>(1, most_scores / scores_of_query);
    for (int64_t q0 = 0; q0 < run.length; q0 += step) {
      const int64_t q1 = std::min(q0 + step, run.length);
      const int64_t k0 = std::max<int64_t>(0, q0 - in.window + 1);
      const int64_t k1 = in.causal ? q1 : std::min(run.length, q1 - 1 + in.window);
      visit(Block{run, q0, q1, k0, k1});
    }
  }
}

// Rows `from .. to` of the segments of a run, by head: (count, heads, to - from, D), a view.
at::Tensor rows(const at::Tensor& x, const Run& run, int64_t from, int64_t to) {
  return x.narrow(0, run.start, run.count * run.length)
      .unflatten(0, {run.count, run.length})
      .narrow(1, from, to - from)
      .transpose(1, 2);
}

// The same of a tensor of query heads, with the heads that share a key head folded into the rows:
// (count, H_kv, G * rows, D).
at::Tensor folded_rows(const Inputs& in, const at::Tensor& x, const Block& b) {
  return rows(x, b.run, b.q0, b.q1)
      .unflatten(1, {in.kv_heads(), in.heads_per_kv()})
      .flatten(2, 3)
      .to(compute_type(in.q));
}

at::Tensor key_rows(const Inputs& in, const at::Tensor& x, const Block& b) {
  return rows(x, b.run, b.k0, b.k1).to(compute_type(in.q));
}

// Back from (count, H_kv, G * rows, D) into the rows of a tensor of query heads.
void put_folded(const Inputs& in, const at::Tensor& into, const Block& b, const at::Tensor& x) {
  rows(into, b.run, b.q0, b.q1)
      .copy_(x.unflatten(2, {in.heads_per_kv(), b.q1 - b.q0}).flatten(1, 2));
}

// Scaled scores, -inf where a query may not look: (count, H_kv, G * rows, keys).
at::Tensor scores_of(const Inputs& in, const Block& b, const at::Tensor& q, const at::Tensor& k) {
  at::Tensor scores = at::matmul(q, k.transpose(-1, -2)).mul_(in.scale);
  const auto places = in.q.options().dtype(at::kLong);
  const at::Tensor distance =
      at::arange(b.q0, b.q1, places).unsqueeze(1) - at::arange(b.k0, b.k1, places);
  at::Tensor hidden = distance >= in.window;
  hidden.logical_or_(in.causal ? distance < 0 : distance <= -in.window);
  scores.unflatten(2, {in.heads_per_kv(), b.q1 - b.q0})
      .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  return scores;
}

// Draws what dropout keeps, divided by the chance to be kept; block after block in one order, so
// that forward and backward draw the same.
class Dropout {
 public:
  Dropout(const Inputs& in, const at::Tensor& random) : p_(in.dropout_p) {
    if (p_ > 0) {
      generator_ = at::globalContext().defaultGenerator(in.q.device()).clone();
      generator_.set_current_seed(static_cast<uint64_t>(random.select(0, 0).item<int64_t>()));
    }
  }

  bool active() const { return p_ > 0; }

  at::Tensor draw(const at::Tensor& like) {
    return at::empty_like(like).bernoulli_(1 - p_, generator_).div_(1 - p_);
  }

 private:
  double p_;
  at::Generator generator_;
};

// (H, T) seen as the rows of a tensor of one column.
at::Tensor as_column(const at::Tensor& logsumexp) {
  return logsumexp.transpose(0, 1).unsqueeze(2);
}

} // namespace

Forward portable_forward(const Inputs& in) {
  const at::Tensor out = at::zeros(in.q.sizes(), in.q.options());
  const at::Tensor logsumexp =
      at::zeros({in.heads(), in.tokens()}, in.q.options().dtype(compute_type(in.q)));
  const at::Tensor random = draw_seed(in);
  Dropout dropout(in, random);
  for_each_block(in, host_borders(in), [&](const Block& b) {
    const at::Tensor v = key_rows(in, in.v, b);
    at::Tensor p = scores_of(in, b, folded_rows(in, in.q, b), key_rows(in, in.k, b));
    const at::Tensor sum = p.logsumexp(-1, /*keepdim=*/true);
    p.sub_(sum).exp_();
    if (dropout.active()) {
      p.mul_(dropout.draw(p));
    }
    put_folded(in, out, b, at::matmul(p, v));
    put_folded(in, as_column(logsumexp), b, sum);
  });
  return {out, logsumexp, random};
}

Gradients portable_backward(const Inputs& in, const Saved& saved) {
  const auto zeros = [&](const at::Tensor& x) {
    return at::zeros(x.sizes(), x.options().dtype(compute_type(in.q)));
  };
  const at::Tensor grad_q = zeros(in.q), grad_k = zeros(in.k), grad_v = zeros(in.v);
  Dropout dropout(in, saved.random);
  for_each_block(in, host_borders(in), [&](const Block& b) {
    const at::Tensor q = folded_rows(in, in.q, b);
    const at::Tensor k = key_rows(in, in.k, b);
    const at::Tensor v = key_rows(in, in.v, b);
    const at::Tensor grad_out = folded_rows(in, saved.grad_out, b);
    const at::Tensor delta = (grad_out * folded_rows(in, saved.out, b)).sum(-1, /*keepdim=*/true);
    at::Tensor p = scores_of(in, b, q, k);
    p.sub_(folded_rows(in, as_column(saved.logsumexp), b)).exp_();
    at::Tensor grad_p = at::matmul(grad_out, v.transpose(-1, -2));
    at::Tensor kept = p;
    if (dropout.active()) {
      const at::Tensor drawn = dropout.draw(p);
      kept = p * drawn;
      grad_p.mul_(drawn);
    }
    rows(grad_v, b.run, b.k0, b.k1).add_(at::matmul(kept.transpose(-1, -2), grad_out));
    const at::Tensor grad_scores = grad_p.sub_(delta).mul_(p).mul_(in.scale);
    put_folded(in, grad_q, b, at::matmul(grad_scores, k));
    rows(grad_k, b.run, b.k0, b.k1).add_(at::matmul(grad_scores.transpose(-1, -2), q));
  });
  return {
      grad_q.to(in.q.scalar_type()), grad_k.to(in.q.scalar_type()), grad_v.to(in.q.scalar_type())};
}

} // namespace multipack::attention
