// The CPU kernels: each hands its arguments to the Rust function of the same name and unpacks what
// comes back.
//
// All checks of arguments and all work are in Rust (src/torch), where tch users find them too. What
// is left here is what only C++ can say: which dispatch key a kernel serves, how an optional tensor
// is spelled, what error class a failure becomes. An absent optional tensor crosses as an undefined
// one.
//
// Every op also has a kernel for all other devices, which refuses in one sentence. Without it torch
// answers with a page about dispatch keys. block_mask computes there instead: see block_mask.cpp.
#include "multipack/cpp/check.h"
#include "multipack/cpp/library.h"
#include "multipack/src/torch/bridge.rs.h"

#include <ATen/core/stack.h>
#include <ATen/ops/scalar_tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace multipack {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Batch = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// cxx has no optional. Rust asks `defined()` where the schema says `Tensor?`.
Tensor or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(Tensor());
}

std::string resolve_config(std::string_view config) {
  return from_rust([&] { return std::string(ffi::resolve_config(to_rust(config))); });
}

Four plan(
    const Tensor& lengths,
    const OptionalTensor& label_counts,
    const OptionalTensor& label_starts,
    std::string_view config,
    int64_t epoch,
    bool evaluation) {
  return from_rust([&]() -> Four {
    ffi::Plan plan = ffi::plan(
        lengths,
        or_undefined(label_counts),
        or_undefined(label_starts),
        to_rust(config),
        epoch,
        evaluation);
    return {*plan.index, *plan.row_offsets, *plan.batch_offsets, *plan.report};
  });
}

Two microbatch(
    const Tensor& index,
    const Tensor& row_offsets,
    const Tensor& batch_offsets,
    int64_t world_size,
    int64_t rank,
    int64_t k) {
  return from_rust([&]() -> Two {
    ffi::Microbatch batch = ffi::microbatch(index, row_offsets, batch_offsets, world_size, rank, k);
    return {*batch.index, *batch.row_offsets};
  });
}

Two label_counts(
    const Tensor& labels, const Tensor& offsets, int64_t max_sample_len, bool mask_first_label) {
  return from_rust([&]() -> Two {
    ffi::LabelCounts found = ffi::label_counts(labels, offsets, max_sample_len, mask_first_label);
    return {*found.counts, *found.starts};
  });
}

// Each handle is copied, which counts a reference up and down again: a few nanoseconds, and no
// data.
Batch unpack(const ffi::Batch& batch) {
  return {
      *batch.input_ids,
      *batch.labels,
      *batch.position_ids,
      *batch.segment_ids,
      *batch.cu_seqlens,
      *batch.cu_seqlens_padded,
      *batch.max_seqlen,
      *batch.attention_mask};
}

// The signatures of collate and collate_list repeat the schema's options one by one because torch
// infers a schema from them and compares; a struct of options cannot cross the dispatcher.
Batch collate(
    const Tensor& tokens,
    const Tensor& offsets,
    const Tensor& index,
    const Tensor& row_offsets,
    const OptionalTensor& labels,
    int64_t row_len,
    int64_t max_sample_len,
    int64_t pad_to_multiple_of,
    int64_t align_samples_to,
    int64_t pad_token_id,
    int64_t position_start,
    bool mask_first_label,
    std::string_view padded_tail,
    std::string_view attention_mask,
    bool causal,
    std::optional<int64_t> window,
    std::optional<at::ScalarType> mask_dtype) {
  return from_rust([&] {
    return unpack(
        ffi::collate(
            tokens,
            offsets,
            index,
            row_offsets,
            or_undefined(labels),
            ffi::CollateOptions{
                {row_len, max_sample_len, pad_to_multiple_of, align_samples_to},
                pad_token_id,
                position_start,
                mask_first_label,
                to_rust(padded_tail),
                to_rust(attention_mask),
                causal,
                window.has_value(),
                window.value_or(0),
                to_rust(mask_dtype)}));
  });
}

Batch collate_list(
    at::TensorList input_ids,
    const Tensor& row_offsets,
    const std::optional<c10::List<Tensor>>& labels,
    int64_t row_len,
    int64_t max_sample_len,
    int64_t pad_to_multiple_of,
    int64_t align_samples_to,
    int64_t pad_token_id,
    int64_t position_start,
    bool mask_first_label,
    std::string_view padded_tail,
    std::string_view attention_mask,
    bool causal,
    std::optional<int64_t> window,
    std::optional<at::ScalarType> mask_dtype) {
  return from_rust([&] {
    // A vector of handles, no data: the one kind of list of C++ objects that cxx can hand to Rust.
    const std::vector<Tensor> labels_of_samples = labels ? labels->vec() : std::vector<Tensor>();
    return unpack(
        ffi::collate_list(
            input_ids.vec(),
            row_offsets,
            labels.has_value(),
            labels_of_samples,
            ffi::CollateOptions{
                {row_len, max_sample_len, pad_to_multiple_of, align_samples_to},
                pad_token_id,
                position_start,
                mask_first_label,
                to_rust(padded_tail),
                to_rust(attention_mask),
                causal,
                window.has_value(),
                window.value_or(0),
                to_rust(mask_dtype)}));
  });
}

// `pad` in the dtype of the values, which must be able to hold it: a float may round it, nothing
// may change it. Torch's own cast wraps integers (-1 becomes 255), cuts fractions and drops
// imaginary parts; so the number goes there and back, and has to be what it was. For floats only
// whether it is finite is compared, which is what rounding keeps.
Tensor pad_of(const at::Scalar& pad, const Tensor& values) {
  const auto refuse_unless = [&](bool held) {
    TORCH_CHECK_VALUE(
        held,
        "pad is ",
        pad,
        ", which torch.",
        c10::getDtypeNames(values.scalar_type()).first,
        " cannot hold");
  };
  at::Scalar number = pad;
  // Complex where the values are, and nowhere else: a cast that drops imaginary parts would warn.
  if (values.is_complex()) {
    number = pad.toComplexDouble();
  } else if (pad.isComplex()) {
    refuse_unless(pad.toComplexDouble().imag() == 0);
    number = pad.toComplexDouble().real();
  }
  const Tensor exact = at::scalar_tensor(number, at::TensorOptions().dtype(number.type()));
  const Tensor held = exact.to(values.scalar_type());
  const Tensor back = held.to(exact.scalar_type());
  refuse_unless(
      at::isIntegralType(values.scalar_type(), /*includeBool=*/true)
          ? back.equal(exact)
          : back.isfinite().equal(exact.isfinite()));
  return held;
}

Tensor pack_values(
    const Tensor& values,
    const Tensor& offsets,
    const Tensor& index,
    const Tensor& row_offsets,
    int64_t row_len,
    int64_t max_sample_len,
    int64_t pad_to_multiple_of,
    int64_t align_samples_to,
    const at::Scalar& pad) {
  return from_rust([&] {
    return *ffi::pack_values(
        values,
        offsets,
        index,
        row_offsets,
        pad_of(pad, values),
        {row_len, max_sample_len, pad_to_multiple_of, align_samples_to});
  });
}

Tensor block_mask(
    const Tensor& segment_ids,
    bool causal,
    std::optional<int64_t> window,
    std::optional<at::ScalarType> dtype) {
  return from_rust([&] {
    return *ffi::block_mask(
        segment_ids, causal, window.has_value(), window.value_or(0), to_rust(dtype));
  });
}

Tensor boundaries(const Tensor& position_ids) {
  return from_rust([&] { return *ffi::boundaries(position_ids); });
}

// Throws if `tensor` is one that a CPU kernel cannot read. The device comes first, because moving
// it is the remedy for most.
void refuse_tensor(const std::string& op, const std::string& argument, const Tensor& tensor) {
  if (!tensor.defined()) {
    return;
  }
  TORCH_CHECK_VALUE(
      tensor.is_cpu(),
      op,
      " runs on the CPU, but ",
      argument,
      " is on ",
      tensor.device().str(),
      ": move it there with .cpu(), and the results back");
  need_dense(op, argument, tensor);
}

// The kernel of every op for everything that is not a dense CPU tensor.
//
// Boxed, so that one function serves all of them: it looks at whatever the schema lists and blames
// the first tensor that is elsewhere, a tensor in a list by its place. An argument may be on the
// CPU and still lead here: torch chooses the kernel by all tensors of a call together.
void refuse(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& name = arguments[i].name();
    if (values[i].isTensor()) {
      refuse_tensor(schema.name(), name, values[i].toTensor());
    } else if (values[i].isTensorList()) {
      const auto list = values[i].toTensorVector();
      for (size_t k = 0; k < list.size(); ++k) {
        refuse_tensor(schema.name(), name + "[" + std::to_string(k) + "]", list[k]);
      }
    }
  }
  // A dispatch key that none of the tensors shows, such as one set by hand.
  TORCH_CHECK(false, schema.name(), " has no kernel for these arguments");
}

} // namespace

TORCH_LIBRARY_IMPL(multipack, CPU, m) {
  if (!owns_ops()) {
    return;
  }
  m.impl("plan", &plan);
  m.impl("microbatch", &microbatch);
  m.impl("label_counts", &label_counts);
  m.impl("collate", &collate);
  m.impl("collate_list", &collate_list);
  m.impl("pack_values", &pack_values);
  m.impl("block_mask", &block_mask);
  m.impl("boundaries", &boundaries);
}

TORCH_LIBRARY_IMPL(multipack, CompositeExplicitAutograd, m) {
  if (!owns_ops()) {
    return;
  }
  // No tensor argument, hence no device.
  m.impl("resolve_config", &resolve_config);
  // Every other one falls to this key where its backend has no kernel of its own.
  for (const char* op :
       {"plan",
        "microbatch",
        "label_counts",
        "collate",
        "collate_list",
        "pack_values",
        "boundaries"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

} // namespace multipack
