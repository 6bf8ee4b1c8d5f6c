// Attention on CUDA, by the varlen kernels that torch ships.
//
//   flash        float16, bfloat16; head sizes that are multiples of 8, up to 256
//   efficient    float32, and half precision where flash does not run; head sizes of whole 16
//                bytes; windows only where causal
//   portable     everything else
//
// Both are called through the dispatcher, so this library links nothing of CUDA's, and one build
// serves machines with and without it. A route depends on the arguments and the device alone, not
// on switches such as torch.nn.attention.sdpa_kernel, so that a backward takes the route of its
// forward.
//
// Nothing here waits for the device where max_seqlen is given. The last border is therefore not
// known on the host, and what lies behind it is set to zero by comparison on the device: one pass
// over the result. The efficient kernel keeps its logsumexp by segment, padded to the longest; it
// is laid out by token for the time between forward and backward, so that memory stays O(T).
#include "multipack/cpp/attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

namespace multipack::attention {
namespace {

// Beyond this a grid of thread blocks cannot count segments.
constexpr int64_t most_segments = 65535;

// The efficient kernel wants room for so many numbers in a row of its logsumexp.
constexpr int64_t logsumexp_multiple = 32;

enum class Route { flash, efficient, portable };

// The borders where the kernels want them, and the longest segment.
struct Varlen {
  at::Tensor cu_seqlens; // int32, on the device
  int64_t longest;
  at::Tensor beyond; // (T,) bool: after the last border

  explicit Varlen(const Inputs& in) {
    if (in.max_seqlen && !in.cu_seqlens.is_cpu()) {
      longest = *in.max_seqlen;
    } else {
      const std::vector<int64_t> borders = host_borders(in);
      longest = 0;
      for (size_t i = 1; i < borders.size(); ++i) {
        longest = std::max(longest, borders[i] - borders[i - 1]);
      }
    }
    longest = std::min(longest, in.tokens());
    cu_seqlens =
        in.cu_seqlens.to(in.q.options().dtype(at::kInt), /*non_blocking=*/true).contiguous();
    beyond = places(in) >= cu_seqlens.select(0, -1);
  }

  static at::Tensor places(const Inputs& in) {
    return at::arange(in.tokens(), in.q.options().dtype(at::kInt));
  }

  // Sets rows that are in no segment to zero; the kernels leave there what was in memory.
  at::Tensor clean(const at::Tensor& x) const {
    return x.masked_fill_(beyond.unsqueeze(1).unsqueeze(2), 0).contiguous();
  }
};

// Whether flash runs on this device and is part of this torch, found out by running it once: no
// function of torch says so without linking to CUDA.
bool flash_runs(const at::Tensor& q) {
  static std::array<std::atomic<int>, 64> known{}; // by device: 0 not tried, 1 runs, 2 does not
  const auto device = static_cast<size_t>(q.device().index());
  TORCH_CHECK(
      device < known.size(),
      "multipack::attention keeps track of 64 devices, but q is on ",
      q.device());
  if (known[device] == 0) {
    try {
      const at::Tensor probe = at::zeros({1, 1, 64}, q.options().dtype(at::kHalf));
      const at::Tensor cu = at::arange(2, q.options().dtype(at::kInt));
      at::_flash_attention_forward(probe, probe, probe, cu, cu, 1, 1, 0.0, true, false);
      known[device] = 1;
    } catch (const c10::Error&) {
      known[device] = 2;
    }
  }
  return known[device] == 1;
}

Route route_of(const Inputs& in) {
  const int64_t size = in.head_size();
  const bool half = in.q.element_size() == 2;
  const bool windowed = in.window < in.tokens();
  if (in.cu_seqlens.size(0) - 1 > most_segments || in.q.element_size() == 8) {
    return Route::portable;
  }
  if (half && size % 8 == 0 && size <= 256 && flash_runs(in.q)) {
    return Route::flash;
  }
  if (size * in.q.element_size() % 16 == 0 && (in.causal || !windowed)) {
    return Route::efficient;
  }
  return Route::portable;
}

bool nothing_to_do(const Inputs& in, const Varlen& varlen) {
  return in.q.numel() == 0 || in.cu_seqlens.size(0) == 1 || varlen.longest == 0;
}

// For flash: how far a query sees back and ahead.
struct Reach {
  std::optional<c10::SymInt> left, right;

  explicit Reach(const Inputs& in) {
    if (in.window < in.tokens()) {
      left = in.window - 1;
      right = in.causal ? 0 : in.window - 1;
    }
  }
};

// For the efficient kernel: a batch of one, and each key head as often as queries use it.
at::Tensor as_batch(const Inputs& in, const at::Tensor& x) {
  const at::Tensor heads =
      x.size(1) == in.heads()
          ? x
          : x.unsqueeze(2).expand({-1, -1, in.heads_per_kv(), -1}).flatten(1, 2);
  return heads.unsqueeze(0);
}

std::optional<int64_t> efficient_window(const Inputs& in) {
  return in.window < in.tokens() ? std::optional<int64_t>(in.window) : std::nullopt;
}

// Where a token stands in a logsumexp (S + 1, longest, H) by segment; tokens of no segment stand in
// the last, which is none.
struct Stand {
  at::Tensor segment, place;

  Stand(const Inputs& in, const Varlen& varlen, int64_t room) {
    const at::Tensor token = Varlen::places(in);
    const at::Tensor& cu = varlen.cu_seqlens;
    segment = at::searchsorted(cu.slice(0, 1), token, /*out_int32=*/false, /*right=*/true);
    place = (token - cu.index_select(0, segment)).clamp(0, room - 1).to(at::kLong);
  }
};

int64_t logsumexp_room(const Varlen& varlen) {
  return (varlen.longest + logsumexp_multiple - 1) / logsumexp_multiple * logsumexp_multiple;
}

at::Tensor by_token(const Inputs& in, const Varlen& varlen, const at::Tensor& by_segment) {
  const Stand stand(in, varlen, by_segment.size(2));
  const at::Tensor segment = stand.segment.clamp_max(by_segment.size(0) - 1);
  return by_segment.permute({0, 2, 1})
      .index({segment, stand.place})
      .masked_fill_(varlen.beyond.unsqueeze(1), 0)
      .transpose(0, 1)
      .contiguous();
}

at::Tensor by_segment(const Inputs& in, const Varlen& varlen, const at::Tensor& by_token) {
  const int64_t room = logsumexp_room(varlen), segments = varlen.cu_seqlens.size(0) - 1;
  const Stand stand(in, varlen, room);
  // Infinite where no token stands, as the kernel itself leaves it: a weight of zero.
  at::Tensor padded = at::full(
      {segments + 1, room, in.heads()}, std::numeric_limits<float>::infinity(), by_token.options());
  padded.index_put_({stand.segment, stand.place}, by_token.transpose(0, 1));
  return padded.narrow(0, 0, segments).permute({0, 2, 1}).contiguous();
}

at::Tensor no_random(const Inputs& in) {
  return at::empty({0}, in.q.options().dtype(at::kLong));
}

} // namespace

Forward cuda_forward(const Inputs& in) {
  const Route route = route_of(in);
  if (route == Route::portable) {
    return portable_forward(in);
  }
  const Varlen varlen(in);
  if (nothing_to_do(in, varlen)) {
    return {
        at::zeros(in.q.sizes(), in.q.options()),
        at::zeros({in.heads(), in.tokens()}, in.q.options().dtype(at::kFloat)),
        draw_seed(in)};
  }
  if (route == Route::flash) {
    const Reach reach(in);
    const auto [out, logsumexp, state, unused, mask] = at::_flash_attention_forward_symint(
        in.q,
        in.k,
        in.v,
        varlen.cu_seqlens,
        varlen.cu_seqlens,
        varlen.longest,
        varlen.longest,
        in.dropout_p,
        in.causal,
        /*return_debug_mask=*/false,
        in.scale,
        reach.left,
        reach.right);
    return {
        varlen.clean(out),
        logsumexp.masked_fill(varlen.beyond, 0),
        in.dropout_p > 0 ? state.view(at::kLong) : no_random(in)};
  }
  const auto [out, logsumexp, seed, offset, longest_q, longest_k] =
      at::_efficient_attention_forward(
          as_batch(in, in.q),
          as_batch(in, in.k),
          as_batch(in, in.v),
          /*bias=*/std::nullopt,
          varlen.cu_seqlens,
          varlen.cu_seqlens,
          varlen.longest,
          varlen.longest,
          in.dropout_p,
          /*custom_mask_type=*/in.causal ? 1 : 0,
          /*compute_log_sumexp=*/true,
          in.scale,
          /*seqlen_k=*/std::nullopt,
          efficient_window(in));
  const auto here = [&](const at::Tensor& x) {
    return x.to(in.q.device(), at::kLong, /*non_blocking=*/true).view({1});
  };
  return {
      varlen.clean(out.squeeze(0)),
      by_token(in, varlen, logsumexp),
      in.dropout_p > 0 ? at::cat({here(seed), here(offset)}) : no_random(in)};
}

Gradients cuda_backward(const Inputs& in, const Saved& saved) {
  const Route route = route_of(in);
  if (route == Route::portable) {
    return portable_backward(in, saved);
  }
  const Varlen varlen(in);
  if (nothing_to_do(in, varlen)) {
    return {
        at::zeros(in.q.sizes(), in.q.options()),
        at::zeros(in.k.sizes(), in.k.options()),
        at::zeros(in.v.sizes(), in.v.options())};
  }
  const at::Tensor random =
      in.dropout_p > 0 ? saved.random : at::zeros({2}, in.q.options().dtype(at::kLong));
  if (route == Route::flash) {
    const Reach reach(in);
    const auto [grad_q, grad_k, grad_v] = at::_flash_attention_backward_symint(
        saved.grad_out,
        in.q,
        in.k,
        in.v,
        saved.out,
        saved.logsumexp,
        varlen.cu_seqlens,
        varlen.cu_seqlens,
        varlen.longest,
        varlen.longest,
        in.dropout_p,
        in.causal,
        random.view(at::kUInt64),
        /*unused=*/at::empty({}, random.options().dtype(at::kUInt64)),
        in.scale,
        reach.left,
        reach.right);
    return {varlen.clean(grad_q), varlen.clean(grad_k), varlen.clean(grad_v)};
  }
  const auto [grad_q, grad_k, grad_v, grad_bias] = at::_efficient_attention_backward(
      saved.grad_out.unsqueeze(0),
      as_batch(in, in.q),
      as_batch(in, in.k),
      as_batch(in, in.v),
      /*bias=*/std::nullopt,
      saved.out.unsqueeze(0),
      varlen.cu_seqlens,
      varlen.cu_seqlens,
      varlen.longest,
      varlen.longest,
      by_segment(in, varlen, saved.logsumexp),
      in.dropout_p,
      random.select(0, 0),
      random.select(0, 1),
      /*custom_mask_type=*/in.causal ? 1 : 0,
      /*bias_requires_grad=*/false,
      in.scale,
      /*num_splits_key=*/std::nullopt,
      efficient_window(in));
  // What query heads that share a key head give to it is added up.
  const auto shared = [&](const at::Tensor& grad) {
    const at::Tensor by_head = varlen.clean(grad.squeeze(0));
    return in.heads_per_kv() == 1 ? by_head
                                  : by_head.unflatten(1, {in.kv_heads(), in.heads_per_kv()}).sum(2);
  };
  return {varlen.clean(grad_q.squeeze(0)), shared(grad_k), shared(grad_v)};
}

} // namespace multipack::attention
