// The schemas of every op: the names, types and defaults that Python, TorchScript and C++ programs
// see.
//
// They live in C++ and not in Python because a C++ program and a saved TorchScript file need them
// without our package. Results are flat tuples of tensors: a tensor crosses torch.compile and
// torch.export, a dict or an int does not. Sizes are SymInt so that a compiled program can be
// traced with them unknown. What an op needs or gives beyond tensors and numbers (the settings of a
// plan, its report) is JSON. Shapes and meanings are documented in torch_ext/multipack/ops.py.
#include "multipack/cpp/library.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <iostream>
#include <string>

namespace multipack {

namespace {

// Two bytes of torch's version number, 0x020d for 2.13.
uint64_t minor_version(uint64_t version) {
  return version >> 48;
}

bool is_first_copy() {
  return !c10::Dispatcher::singleton().findSchema({"multipack::collate", ""}).has_value();
}

bool is_same_torch() {
  const uint64_t loaded = minor_version(aoti_torch_abi_version());
  const uint64_t compiled = minor_version(TORCH_ABI_VERSION);
  if (loaded != compiled) {
    std::cerr << "multipack: the library was built for torch " << (compiled >> 8) << '.'
              << (compiled & 0xff) << ", but this is torch " << (loaded >> 8) << '.'
              << (loaded & 0xff) << ": it has no ops here; build it again for this torch"
              << std::endl;
  }
  return loaded == compiled;
}

} // namespace

bool owns_ops() {
  static const bool owns = is_first_copy() && is_same_torch();
  return owns;
}

namespace {

// What collate and collate_list share: how rows are laid out, and what comes out.
const char* const collate_options =
    "SymInt row_len=0, int max_sample_len=0, int pad_to_multiple_of=1, int align_samples_to=1, "
    "int pad_token_id=0, int position_start=0, bool mask_first_label=True, "
    "str padded_tail=\"own\", str attention_mask=\"none\", bool causal=True, int? window=None, "
    "ScalarType? mask_dtype=None) -> (Tensor input_ids, Tensor labels, Tensor position_ids, "
    "Tensor segment_ids, Tensor cu_seqlens, Tensor cu_seqlens_padded, Tensor max_seqlen, "
    "Tensor attention_mask)";

} // namespace

// A fragment, because a second copy of the library may not claim the namespace again: see
// library.h.
TORCH_LIBRARY_FRAGMENT(multipack, m) {
  if (!owns_ops()) {
    return;
  }
  // Torch names this module when a compiled program meets an op whose shape function was never
  // imported.
  m.set_python_module("multipack._fake");

  m.def("resolve_config(str config) -> str");
  m.def(
      "plan(Tensor lengths, Tensor? label_counts, Tensor? label_starts, str config, int epoch=0, "
      "bool evaluation=False) -> (Tensor index, Tensor row_offsets, Tensor batch_offsets, "
      "Tensor report)");
  m.def(
      "microbatch(Tensor index, Tensor row_offsets, Tensor batch_offsets, int world_size, "
      "int rank, int k) -> (Tensor index, Tensor row_offsets)");
  m.def(
      "label_counts(Tensor labels, Tensor offsets, *, int max_sample_len=0, "
      "bool mask_first_label=True) -> (Tensor counts, Tensor starts)");
  const std::string options = collate_options;
  const std::string collate =
      "collate(Tensor tokens, Tensor offsets, Tensor index, Tensor row_offsets, *, "
      "Tensor? labels=None, " +
      options;
  const std::string collate_list =
      "collate_list(Tensor[] input_ids, Tensor row_offsets, *, Tensor[]? labels=None, " + options;
  m.def(collate.c_str());
  m.def(collate_list.c_str());
  m.def(
      "pack_values(Tensor values, Tensor offsets, Tensor index, Tensor row_offsets, *, "
      "SymInt row_len=0, int max_sample_len=0, int pad_to_multiple_of=1, int align_samples_to=1, "
      "Scalar pad=0) -> Tensor");
  m.def(
      "block_mask(Tensor segment_ids, *, bool causal=True, int? window=None, "
      "ScalarType? dtype=None) -> Tensor");
  m.def("boundaries(Tensor position_ids) -> Tensor");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, *, SymInt? max_seqlen=None, "
      "bool causal=True, int? window=None, float? scale=None, float dropout_p=0.0) -> Tensor",
      {at::Tag::nondeterministic_seeded});
  // The two halves of attention: see attention.cpp.
  m.def(
      "_attention_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, SymInt? max_seqlen, "
      "bool causal, int? window, float? scale, float dropout_p) -> (Tensor out, "
      "Tensor logsumexp, Tensor random)",
      {at::Tag::nondeterministic_seeded});
  m.def(
      "_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor logsumexp, Tensor random, Tensor cu_seqlens, SymInt? max_seqlen, bool causal, "
      "int? window, float? scale, float dropout_p) -> (Tensor grad_q, Tensor grad_k, "
      "Tensor grad_v)");
}

} // namespace multipack
