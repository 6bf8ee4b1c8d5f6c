// The ops for C++ programs: typed functions with the names, arguments and defaults of the Python
// ones.
//
//   #include <multipack/multipack.h>
//
//   multipack::CollateOptions options;
//   options.row_len = 4096;
//   multipack::Batch batch = multipack::collate(tokens, offsets, index, row_offsets, options);
//
// Each function looks its op up in torch's dispatcher once and calls it, as Python does. So there
// is one implementation and one set of errors: c10::ValueError, c10::TypeError and c10::IndexError,
// all of them c10::Error, with the sentence in what_without_backtrace(). Shapes and meanings are
// documented in multipack/ops.py.
//
// Link with multipack::multipack of find_package(multipack), or with -lmultipack, torch_cpu and
// c10. A program that loads the library with dlopen needs no header: it calls the dispatcher
// itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Scalar.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

extern "C" std::int32_t multipack_abi_version();

namespace multipack {

// A packed batch of R rows of L tokens with S segments.
struct Batch {
  at::Tensor input_ids; // (R, L) int64
  at::Tensor labels; // (R, L) int64, -100 where there is nothing to learn
  at::Tensor position_ids; // (R, L) int64
  at::Tensor segment_ids; // (R, L) int32, from 1 in every row, 0 on padding
  at::Tensor cu_seqlens; // (S + 1,) int32
  at::Tensor cu_seqlens_padded; // (S + 1,) int32
  at::Tensor max_seqlen; // int32 without dimensions
  at::Tensor attention_mask; // (R, 1, L, L), or (0,)
};

struct Plan {
  at::Tensor index; // int64: sample numbers, row after row
  at::Tensor row_offsets; // int64: where each row begins in index
  at::Tensor batch_offsets; // int64: where each microbatch begins among the rows
  at::Tensor report; // uint8: JSON
};

struct Microbatch {
  at::Tensor index; // (M,) int64
  at::Tensor row_offsets; // (R + 1,) int64
};

struct LabelCounts {
  at::Tensor counts; // (N,) int64
  at::Tensor starts; // (N,) bool
};

struct CollateOptions {
  std::int64_t row_len = 0; // 0: as long as the longest row
  std::int64_t max_sample_len = 0; // 0: no limit
  std::int64_t pad_to_multiple_of = 1;
  std::int64_t align_samples_to = 1;
  std::int64_t pad_token_id = 0;
  std::int64_t position_start = 0;
  bool mask_first_label = true;
  std::string padded_tail = "own"; // or "last", "none"
  std::string attention_mask = "none"; // or "bool", "additive"
  bool causal = true;
  std::optional<std::int64_t> window = std::nullopt;
  std::optional<at::ScalarType> mask_dtype = std::nullopt;
};

namespace detail {

// What this header was written for; a reference that makes the linker keep the library.
inline void check_version() {
  static const bool same = multipack_abi_version() == 1;
  TORCH_CHECK(same, "multipack.h is of another version than the multipack library: rebuild");
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  check_version();
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// A struct from the tuple of its members.
template <typename Struct, typename... Members>
Struct named(std::tuple<Members...> tuple) {
  return std::apply(
      [](auto&&... member) { return Struct{std::forward<decltype(member)>(member)...}; },
      std::move(tuple));
}

using OptionalTensor = std::optional<at::Tensor>;
using BatchTuple = std::tuple<
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor>;

} // namespace detail

inline std::string resolve_config(std::string_view config) {
  static const auto op = detail::find<std::string(std::string_view)>("multipack::resolve_config");
  return op.call(config);
}

inline Plan plan(
    const at::Tensor& lengths,
    const std::optional<at::Tensor>& label_counts,
    const std::optional<at::Tensor>& label_starts,
    std::string_view config,
    std::int64_t epoch = 0,
    bool evaluation = false) {
  static const auto op = detail::find<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&,
      const detail::OptionalTensor&,
      const detail::OptionalTensor&,
      std::string_view,
      std::int64_t,
      bool)>("multipack::plan");
  return detail::named<Plan>(
      op.call(lengths, label_counts, label_starts, config, epoch, evaluation));
}

inline Microbatch microbatch(
    const at::Tensor& index,
    const at::Tensor& row_offsets,
    const at::Tensor& batch_offsets,
    std::int64_t world_size,
    std::int64_t rank,
    std::int64_t k) {
  static const auto op = detail::find<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&,
      const at::Tensor&,
      const at::Tensor&,
      std::int64_t,
      std::int64_t,
      std::int64_t)>("multipack::microbatch");
  return detail::named<Microbatch>(
      op.call(index, row_offsets, batch_offsets, world_size, rank, k));
}

inline LabelCounts label_counts(
    const at::Tensor& labels,
    const at::Tensor& offsets,
    std::int64_t max_sample_len = 0,
    bool mask_first_label = true) {
  static const auto op = detail::find<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, std::int64_t, bool)>("multipack::label_counts");
  return detail::named<LabelCounts>(op.call(labels, offsets, max_sample_len, mask_first_label));
}

inline Batch collate(
    const at::Tensor& tokens,
    const at::Tensor& offsets,
    const at::Tensor& index,
    const at::Tensor& row_offsets,
    const CollateOptions& options = {},
    const std::optional<at::Tensor>& labels = std::nullopt) {
  static const auto op = detail::find<detail::BatchTuple(
      const at::Tensor&,
      const at::Tensor&,
      const at::Tensor&,
      const at::Tensor&,
      const detail::OptionalTensor&,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      bool,
      std::string_view,
      std::string_view,
      bool,
      std::optional<std::int64_t>,
      std::optional<at::ScalarType>)>("multipack::collate");
  return detail::named<Batch>(op.call(
      tokens,
      offsets,
      index,
      row_offsets,
      labels,
      options.row_len,
      options.max_sample_len,
      options.pad_to_multiple_of,
      options.align_samples_to,
      options.pad_token_id,
      options.position_start,
      options.mask_first_label,
      options.padded_tail,
      options.attention_mask,
      options.causal,
      options.window,
      options.mask_dtype));
}

inline Batch collate_list(
    at::TensorList input_ids,
    const at::Tensor& row_offsets,
    const CollateOptions& options = {},
    const std::optional<c10::List<at::Tensor>>& labels = std::nullopt) {
  static const auto op = detail::find<detail::BatchTuple(
      at::TensorList,
      const at::Tensor&,
      const std::optional<c10::List<at::Tensor>>&,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      bool,
      std::string_view,
      std::string_view,
      bool,
      std::optional<std::int64_t>,
      std::optional<at::ScalarType>)>("multipack::collate_list");
  return detail::named<Batch>(op.call(
      input_ids,
      row_offsets,
      labels,
      options.row_len,
      options.max_sample_len,
      options.pad_to_multiple_of,
      options.align_samples_to,
      options.pad_token_id,
      options.position_start,
      options.mask_first_label,
      options.padded_tail,
      options.attention_mask,
      options.causal,
      options.window,
      options.mask_dtype));
}

// Of the options, those that decide the shape of the rows.
inline at::Tensor pack_values(
    const at::Tensor& values,
    const at::Tensor& offsets,
    const at::Tensor& index,
    const at::Tensor& row_offsets,
    const CollateOptions& options = {},
    const at::Scalar& pad = 0) {
  static const auto op = detail::find<at::Tensor(
      const at::Tensor&,
      const at::Tensor&,
      const at::Tensor&,
      const at::Tensor&,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      std::int64_t,
      const at::Scalar&)>("multipack::pack_values");
  return op.call(
      values,
      offsets,
      index,
      row_offsets,
      options.row_len,
      options.max_sample_len,
      options.pad_to_multiple_of,
      options.align_samples_to,
      pad);
}

inline at::Tensor block_mask(
    const at::Tensor& segment_ids,
    bool causal = true,
    std::optional<std::int64_t> window = std::nullopt,
    std::optional<at::ScalarType> dtype = std::nullopt) {
  static const auto op = detail::find<at::Tensor(
      const at::Tensor&, bool, std::optional<std::int64_t>, std::optional<at::ScalarType>)>(
      "multipack::block_mask");
  return op.call(segment_ids, causal, window, dtype);
}

inline at::Tensor boundaries(const at::Tensor& position_ids) {
  static const auto op = detail::find<at::Tensor(const at::Tensor&)>("multipack::boundaries");
  return op.call(position_ids);
}

} // namespace multipack
