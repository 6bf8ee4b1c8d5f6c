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
// all of them c10::Error, with the sentence in what_without_backtrace(). Functions may be called
// from several threads at once, and results share no memory with the arguments.
//
// The comments below are a short form of multipack/ops.py, which has every option, shape and error.
// Sample i is tokens[offsets[i] .. offsets[i + 1]], and row r of a batch holds the samples
// index[row_offsets[r] .. row_offsets[r + 1]]. Arguments are CPU tensors, contiguous or not; only
// block_mask and attention take others. Token ids and labels are int32 or int64, lengths, offsets
// and indices any integer dtype. Letters in shapes: N samples in all, T tokens of theirs, M samples
// of a batch, R rows of L tokens, S segments.
//
// Link with multipack::multipack of find_package(multipack), or with -lmultipack, torch_cpu and
// c10. A program that loads the library with dlopen needs no header: it calls the dispatcher
// itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Scalar.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

// The one symbol that a program links to.
extern "C" std::int32_t multipack_abi_version();

namespace multipack {

// A packed batch. In the comments, samples of 3 and 2 tokens in one row of 8.
struct Batch {
  at::Tensor input_ids;         // (R, L) int64, the pad id on padding
  at::Tensor labels;            // (R, L) int64, not shifted, -100 where there is nothing to learn
  at::Tensor position_ids;      // (R, L) int64: 0 1 2 0 1 0 1 2
  at::Tensor segment_ids;       // (R, L) int32: 1 1 1 2 2 0 0 0, from 1 in every row, 0 on padding
  at::Tensor cu_seqlens;        // (S + 1,) int32: 0 3 5 8, borders in the flattened tokens
  at::Tensor cu_seqlens_padded; // (S + 1,) int32: the same, or the slots where samples are aligned
  at::Tensor max_seqlen;        // int32 without dimensions: 3, the longest segment
  at::Tensor attention_mask;    // (R, 1, L, L), or (0,) bool where none was asked for
};

// An epoch for all ranks: samples in rows, rows in microbatches, each as offsets into the level
// below. Microbatches are ordered by step and then by rank: number k of a rank is entry
// k * world_size + rank.
struct Plan {
  at::Tensor index;         // int64: sample numbers, row after row
  at::Tensor row_offsets;   // int64: where each row begins in index, and the end
  at::Tensor batch_offsets; // int64: where each microbatch begins among the rows, and the end
  at::Tensor report;        // uint8: JSON, with what was dropped and how dense the rows are
};

// What one rank takes in one forward and backward: two arguments of collate.
struct Microbatch {
  at::Tensor index;       // (M,) int64
  at::Tensor row_offsets; // (R + 1,) int64
};

// Two arguments of plan.
struct LabelCounts {
  at::Tensor counts; // (N,) int64: labels that enter the loss
  at::Tensor starts; // (N,) bool: whether the first label is supervised in the data
};

// How collate lays out a batch; with the defaults of the schema.
struct CollateOptions {
  std::int64_t row_len = 0; // L; 0: as long as the longest row, rounded up to pad_to_multiple_of
  std::int64_t max_sample_len = 0; // longer samples are cut there; 0: no limit
  std::int64_t pad_to_multiple_of = 1;
  std::int64_t align_samples_to = 1; // each sample's slot is rounded up to a multiple of this
  std::int64_t pad_token_id = 0;
  std::int64_t position_start = 0; // of the first token of each sample
  bool mask_first_label = true;    // so that no token is predicted from the sample before
  // What cu_seqlens says of the padding at the end of a row: "own" segments, part of the "last"
  // sample's (causal only), or "none" (one row only).
  std::string padded_tail = "own";
  std::string attention_mask = "none"; // or "bool" (true: may attend), "additive" (0 and lowest)
  bool causal = true;
  std::optional<std::int64_t> window = std::nullopt;       // see block_mask
  std::optional<at::ScalarType> mask_dtype = std::nullopt; // of an additive mask; float32
};

namespace detail {

// Compares what this header was written for with what was loaded; typed() below would compare
// signatures as well, but in words that name no remedy. And a reference that makes the linker keep
// the library: --as-needed, the default of many distributions, drops one that nothing refers to.
inline void check_version() {
  static const bool same = multipack_abi_version() == 1;
  TORCH_CHECK(same, "multipack.h is of another version than the multipack library: rebuild");
}

// The op of that name, which throws if the signature is not the schema's. Each function keeps what
// this returns in a static of its own, so that a call costs no look-up in a table of names.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  check_version();
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  TORCH_CHECK(
      op.has_value(),
      "there is no ",
      name,
      ": the multipack library was built for another torch, as it said when it was loaded");
  return op->typed<Signature>();
}

// A struct from the tuple of its members, by their order: the structs above list the results as the
// schemas do.
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

// Checks settings, a JSON object, and returns them with every default filled in.
inline std::string resolve_config(std::string_view config) {
  static const auto op = detail::find<std::string(std::string_view)>("multipack::resolve_config");
  return op.call(config);
}

// Plans an epoch. Without label_counts, (N,) integers, every token is supervised; label_starts,
// (N,) bool, matters where first labels are not masked. `config` is a JSON object that has at least
// sequence_len. The same arguments give the same plan on every rank, so that ranks need not talk to
// each other.
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

// Takes microbatch k of a rank out of a plan for world_size ranks. IndexError if there is none.
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
  return detail::named<Microbatch>(op.call(index, row_offsets, batch_offsets, world_size, rank, k));
}

// Counts the labels that collate will leave in the loss, with the same two options as there.
inline LabelCounts label_counts(
    const at::Tensor& labels,
    const at::Tensor& offsets,
    std::int64_t max_sample_len = 0,
    bool mask_first_label = true) {
  static const auto op = detail::find<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, std::int64_t, bool)>("multipack::label_counts");
  return detail::named<LabelCounts>(op.call(labels, offsets, max_sample_len, mask_first_label));
}

// Lays the samples `index` end to end in rows. `labels`, (T,), share the offsets of the tokens;
// without them the tokens are the labels. One pass over the batch, whatever N and T are.
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

// The same for samples that are a tensor each: all of them, in order. For programs that have
// nothing flat, because it copies the samples once more, and each tensor costs as much as a few
// hundred tokens.
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

// Lays other values, (T,) of any dtype, out like the tokens: (R, L) of the same dtype, `pad` where
// there is no token. Of the options only those count that decide the shape of the rows: row_len,
// max_sample_len, pad_to_multiple_of and align_samples_to. ValueError if the dtype cannot hold pad.
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

// The mask (R, 1, L, L) of segment ids (R, L) or (L,), on their device. A query may attend to the
// keys of its row with its own id, padding to padding; causal: to none that is later; window: to
// none that is so many tokens away or more. dtype: bool by default, or a float dtype for 0 and
// lowest. It takes R * L * L entries and is refused above 8 GiB: give attention cu_seqlens where it
// can read them.
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

// The cu_seqlens of a batch that was packed elsewhere: a segment begins with each row of
// position_ids, (R, L) or (L,), and wherever a position is not one more than the one before.
inline at::Tensor boundaries(const at::Tensor& position_ids) {
  static const auto op = detail::find<at::Tensor(const at::Tensor&)>("multipack::boundaries");
  return op.call(position_ids);
}

// How attention looks; with the defaults of the schema.
struct AttentionOptions {
  // The longest segment or more: on CUDA it saves a wait for the device, and is trusted.
  std::optional<c10::SymInt> max_seqlen = std::nullopt;
  bool causal = true;
  std::optional<std::int64_t> window = std::nullopt; // see block_mask
  std::optional<double> scale = std::nullopt;        // 1 / sqrt(D)
  double dropout_p = 0;
};

// Exact attention of q, (T, H, D), to k and v, (T, H_kv, D), within the segments that cu_seqlens
// borders, on their device and without a mask. Tokens after the last border give zeros.
// Differentiable once.
inline at::Tensor attention(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& cu_seqlens,
    const AttentionOptions& options = {}) {
  static const auto op = detail::find<at::Tensor(
      const at::Tensor&,
      const at::Tensor&,
      const at::Tensor&,
      const at::Tensor&,
      std::optional<c10::SymInt>,
      bool,
      std::optional<std::int64_t>,
      std::optional<double>,
      double)>("multipack::attention");
  return op.call(
      q,
      k,
      v,
      cu_seqlens,
      options.max_seqlen,
      options.causal,
      options.window,
      options.scale,
      options.dropout_p);
}

} // namespace multipack
