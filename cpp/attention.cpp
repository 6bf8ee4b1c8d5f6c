// attention: exact attention within the segments of packed rows, without a mask.
//
// A query sees the keys of its own segment, where causal none that is later, with a window none
// that is too far: what scaled_dot_product_attention gives with a block-diagonal mask, for the sum
// of length^2 instead of its square, and without the mask's memory.
//
// The public op differentiates once: it calls _attention_forward and leaves _attention_backward to
// autograd. Those are ops of their own so that torch.compile sees them below autograd and can put
// forward and backward in its graphs. This file checks arguments and chooses who computes; see
// attention.h for the routes.
//
// Nothing is cached between calls, so that nothing can be stale. What all layers of a model share
// is what the caller computed once for the batch: cu_seqlens and max_seqlen. On the CPU the borders
// are read where they are, a few nanoseconds each. On CUDA the kernels read them on the device, and
// only the longest length has to be known on the host: given max_seqlen, nothing waits.
#include "multipack/cpp/attention.h"
#include "multipack/cpp/check.h"
#include "multipack/cpp/library.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <limits>

namespace multipack::attention {

at::Tensor draw_seed(const Inputs& inputs) {
  const int64_t numbers = inputs.dropout_p > 0 ? 2 : 0;
  return at::empty({numbers}, inputs.q.options().dtype(at::kLong)).random_();
}

std::vector<int64_t> host_borders(const Inputs& inputs) {
  const at::Tensor cu = inputs.cu_seqlens.to(at::kCPU, at::kLong).contiguous();
  const int64_t* const data = cu.const_data_ptr<int64_t>();
  std::vector<int64_t> borders(data, data + cu.numel());
  TORCH_CHECK_VALUE(
      borders[0] == 0, "cu_seqlens[0] is ", borders[0], ", but the first segment begins at 0");
  for (size_t i = 1; i < borders.size(); ++i) {
    const int64_t length = borders[i] - borders[i - 1];
    TORCH_CHECK_VALUE(
        length >= 0, "cu_seqlens falls from ", borders[i - 1], " to ", borders[i], " at entry ", i);
    TORCH_CHECK_VALUE(
        !inputs.max_seqlen || length <= *inputs.max_seqlen,
        "segment ",
        i - 1,
        " has ",
        length,
        " tokens, more than max_seqlen ",
        inputs.max_seqlen.value_or(0));
  }
  TORCH_CHECK_VALUE(
      borders.back() <= inputs.tokens(),
      "cu_seqlens ends at ",
      borders.back(),
      ", but q has ",
      inputs.tokens(),
      " tokens");
  return borders;
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Length = std::optional<c10::SymInt>;
using Window = std::optional<int64_t>;
using Scale = std::optional<double>;

const char* const op_name = "multipack::attention";

void check_qkv(const char* name, const Tensor& x, const Tensor& q) {
  need_dense(op_name, name, x);
  TORCH_CHECK_VALUE(
      x.dim() == 3, name, " has shape ", x.sizes(), ", but must be (tokens, heads, head size)");
  TORCH_CHECK_VALUE(
      x.device() == q.device(), name, " is on ", x.device(), ", but q is on ", q.device());
  TORCH_CHECK_TYPE(
      x.scalar_type() == q.scalar_type(),
      name,
      " has dtype torch.",
      c10::getDtypeNames(x.scalar_type()).first,
      ", but q has torch.",
      c10::getDtypeNames(q.scalar_type()).first);
  TORCH_CHECK_VALUE(
      x.size(0) == q.size(0) && x.size(2) == q.size(2),
      name,
      " has shape ",
      x.sizes(),
      ", but q has ",
      q.sizes(),
      ": tokens and head size must be the same");
}

// The arguments of a call, checked as far as shapes, dtypes and devices say.
Inputs check(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& cu_seqlens,
    std::optional<int64_t> max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p) {
  check_qkv("q", q, q);
  TORCH_CHECK_TYPE(
      q.scalar_type() == at::kFloat || q.scalar_type() == at::kBFloat16 ||
          q.scalar_type() == at::kHalf || q.scalar_type() == at::kDouble,
      "q has dtype torch.",
      c10::getDtypeNames(q.scalar_type()).first,
      ", but must be float32, bfloat16, float16 or float64");
  check_qkv("k", k, q);
  check_qkv("v", v, q);
  TORCH_CHECK_VALUE(q.size(2) > 0, "q has shape ", q.sizes(), ": the head size must not be 0");
  TORCH_CHECK_VALUE(k.size(1) == v.size(1), "k has ", k.size(1), " heads, but v has ", v.size(1));
  TORCH_CHECK_VALUE(
      k.size(1) > 0 && q.size(1) > 0 && q.size(1) % k.size(1) == 0,
      "q has ",
      q.size(1),
      " heads, which must be a multiple of the ",
      k.size(1),
      " heads of k and v");
  TORCH_CHECK_VALUE(
      q.size(0) <= std::numeric_limits<int32_t>::max(),
      "q has ",
      q.size(0),
      " tokens, more than int32 borders can count");
  need_dense(op_name, "cu_seqlens", cu_seqlens);
  TORCH_CHECK_TYPE(
      cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong,
      "cu_seqlens has dtype torch.",
      c10::getDtypeNames(cu_seqlens.scalar_type()).first,
      ", but must be int32 or int64");
  TORCH_CHECK_VALUE(
      cu_seqlens.dim() == 1 && cu_seqlens.size(0) > 0,
      "cu_seqlens has shape ",
      cu_seqlens.sizes(),
      ", but must be (segments + 1,)");
  TORCH_CHECK_VALUE(
      cu_seqlens.is_cpu() || cu_seqlens.device() == q.device(),
      "cu_seqlens is on ",
      cu_seqlens.device(),
      ", but q is on ",
      q.device());
  TORCH_CHECK_VALUE(
      !max_seqlen || *max_seqlen >= 0,
      "max_seqlen is ",
      max_seqlen.value_or(0),
      ", but must not be negative");
  TORCH_CHECK_VALUE(
      !window || *window >= 1, "window is ", window.value_or(0), ", but must be at least 1");
  TORCH_CHECK_VALUE(
      dropout_p >= 0 && dropout_p < 1,
      "dropout_p is ",
      dropout_p,
      ", but must be at least 0 and less than 1");
  const auto dense_rows = [](const Tensor& x) {
    return x.stride(2) == 1 || x.size(2) == 1 ? x : x.contiguous();
  };
  // No two tokens are further apart than all of them.
  const int64_t no_limit = std::max<int64_t>(q.size(0), 1);
  return {
      dense_rows(q),
      dense_rows(k),
      dense_rows(v),
      cu_seqlens,
      max_seqlen,
      causal,
      std::min(window.value_or(no_limit), no_limit),
      scale.value_or(1 / std::sqrt(static_cast<double>(q.size(2)))),
      dropout_p};
}

template <Forward (*route)(const Inputs&)>
Forward forward_kernel(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& cu_seqlens,
    std::optional<int64_t> max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p) {
  return route(check(q, k, v, cu_seqlens, max_seqlen, causal, window, scale, dropout_p));
}

template <Gradients (*route)(const Inputs&, const Saved&)>
Gradients backward_kernel(
    const Tensor& grad_out,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& out,
    const Tensor& logsumexp,
    const Tensor& random,
    const Tensor& cu_seqlens,
    std::optional<int64_t> max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p) {
  const Inputs inputs = check(q, k, v, cu_seqlens, max_seqlen, causal, window, scale, dropout_p);
  // Of autograd they are what they should be, but kernels would read on past shorter ones.
  const std::array<int64_t, 2> by_head{inputs.heads(), inputs.tokens()};
  TORCH_CHECK_VALUE(
      grad_out.sizes() == q.sizes() && out.sizes() == q.sizes() &&
          logsumexp.sizes() == at::IntArrayRef(by_head) &&
          random.numel() == (dropout_p > 0 ? 2 : 0),
      "grad_out, out, logsumexp and random are not those of a forward with this q and dropout_p");
  return route(
      inputs,
      {grad_out.stride(2) == 1 ? grad_out : grad_out.contiguous(),
       out.contiguous(),
       logsumexp.contiguous(),
       random});
}

// The ops as the dispatcher calls them.
using AttentionOp = Tensor(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& cu_seqlens,
    Length max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p);
using ForwardOp = Forward(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& cu_seqlens,
    Length max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p);
using BackwardOp = Gradients(
    const Tensor& grad_out,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& out,
    const Tensor& logsumexp,
    const Tensor& random,
    const Tensor& cu_seqlens,
    Length max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

template <typename... Args>
Forward call_forward(const Args&... args) {
  static const auto op = find<ForwardOp>("multipack::_attention_forward");
  return op.call(args...);
}

template <typename... Args>
Gradients call_backward(const Args&... args) {
  static const auto op = find<BackwardOp>("multipack::_attention_backward");
  return op.call(args...);
}

struct Differentiable : torch::autograd::Function<Differentiable> {
  static Tensor forward(
      AutogradContext* ctx,
      const Tensor& q,
      const Tensor& k,
      const Tensor& v,
      const Tensor& cu_seqlens,
      const Length& max_seqlen,
      bool causal,
      Window window,
      Scale scale,
      double dropout_p) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, logsumexp, random] =
        call_forward(q, k, v, cu_seqlens, max_seqlen, causal, window, scale, dropout_p);
    ctx->save_for_backward({q, k, v, out, logsumexp, random, cu_seqlens});
    ctx->saved_data["max_seqlen"] = max_seqlen;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["dropout_p"] = dropout_p;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const c10::IValue& length = ctx->saved_data["max_seqlen"];
    auto [grad_q, grad_k, grad_v] = call_backward(
        grads[0],
        saved[0],
        saved[1],
        saved[2],
        saved[3],
        saved[4],
        saved[5],
        saved[6],
        length.isNone() ? Length() : Length(length.toSymInt()),
        ctx->saved_data["causal"].toBool(),
        ctx->saved_data["window"].toOptional<int64_t>(),
        ctx->saved_data["scale"].toOptional<double>(),
        ctx->saved_data["dropout_p"].toDouble());
    const Tensor none;
    return {grad_q, grad_k, grad_v, none, none, none, none, none, none};
  }
};

// The backward as autograd sees it where it is asked to record: a step that cannot be taken once
// more. Without this the second derivative would be silently zero.
struct OnceDifferentiable : torch::autograd::Function<OnceDifferentiable> {
  template <typename... Args>
  static variable_list forward(AutogradContext*, const Args&... args) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [grad_q, grad_k, grad_v] = call_backward(args...);
    return {grad_q, grad_k, grad_v};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "multipack::attention has no second derivative: where one is needed, use "
        "scaled_dot_product_attention with the mask of multipack::block_mask");
  }
};

Tensor attention_autograd(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& cu_seqlens,
    Length max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p) {
  return Differentiable::apply(q, k, v, cu_seqlens, max_seqlen, causal, window, scale, dropout_p);
}

Gradients backward_autograd(
    const Tensor& grad_out,
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& out,
    const Tensor& logsumexp,
    const Tensor& random,
    const Tensor& cu_seqlens,
    Length max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p) {
  const variable_list grads = OnceDifferentiable::apply(
      grad_out,
      q,
      k,
      v,
      out,
      logsumexp,
      random,
      cu_seqlens,
      max_seqlen,
      causal,
      window,
      scale,
      dropout_p);
  return {grads[0], grads[1], grads[2]};
}

// Without autograd, as under inference_mode.
Tensor attention_alone(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& cu_seqlens,
    Length max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p) {
  return std::get<0>(
      call_forward(q, k, v, cu_seqlens, max_seqlen, causal, window, scale, dropout_p));
}

// Under autocast q, k and v come in different dtypes (rotary embeddings are float32 there), and
// attention runs in the lower precision, as torch's own does.
template <c10::DeviceType device>
Tensor attention_autocast(
    const Tensor& q,
    const Tensor& k,
    const Tensor& v,
    const Tensor& cu_seqlens,
    Length max_seqlen,
    bool causal,
    Window window,
    Scale scale,
    double dropout_p) {
  c10::impl::ExcludeDispatchKeyGuard below_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  static const auto op = find<AttentionOp>("multipack::attention");
  const auto cast = [](const Tensor& x) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device);
  };
  return op.call(
      cast(q), cast(k), cast(v), cu_seqlens, max_seqlen, causal, window, scale, dropout_p);
}

} // namespace

TORCH_LIBRARY_IMPL(multipack, CPU, m) {
  if (owns_ops()) {
    m.impl("_attention_forward", &forward_kernel<cpu_forward>);
    m.impl("_attention_backward", &backward_kernel<cpu_backward>);
  }
}

TORCH_LIBRARY_IMPL(multipack, CUDA, m) {
  if (owns_ops()) {
    m.impl("_attention_forward", &forward_kernel<cuda_forward>);
    m.impl("_attention_backward", &backward_kernel<cuda_backward>);
  }
}

// For every backend that has none of its own.
TORCH_LIBRARY_IMPL(multipack, CompositeExplicitAutograd, m) {
  if (owns_ops()) {
    m.impl("attention", &attention_alone);
    m.impl("_attention_forward", &forward_kernel<portable_forward>);
    m.impl("_attention_backward", &backward_kernel<portable_backward>);
  }
}

TORCH_LIBRARY_IMPL(multipack, Autograd, m) {
  if (owns_ops()) {
    m.impl("attention", &attention_autograd);
    m.impl("_attention_backward", &backward_autograd);
  }
}

TORCH_LIBRARY_IMPL(multipack, AutocastCPU, m) {
  if (owns_ops()) {
    m.impl("attention", &attention_autocast<at::kCPU>);
  }
}

TORCH_LIBRARY_IMPL(multipack, AutocastCUDA, m) {
  if (owns_ops()) {
    m.impl("attention", &attention_autocast<at::kCUDA>);
  }
}

} // namespace multipack::attention
