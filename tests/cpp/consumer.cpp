// Packs a batch through the header, catches an error by its class, and runs a TorchScript file that
// uses the ops. Exits with the number of the first check that fails.
#include <multipack/multipack.h>

#include <ATen/ops/allclose.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

namespace {

int checks = 0;

void check(bool holds, const std::string& what) {
  ++checks;
  if (!holds) {
    std::cerr << "check " << checks << " failed: " << what << std::endl;
    std::exit(checks);
  }
}

at::Tensor ints(std::vector<int64_t> values) {
  return at::tensor(values, at::kLong);
}

} // namespace

int main(int count, char** arguments) {
  check(count == 2, "one argument, the TorchScript file");
  const at::Tensor tokens = ints({11, 12, 13, 21, 22});
  const at::Tensor offsets = ints({0, 3, 5});
  const at::Tensor index = ints({0, 1});
  const at::Tensor row_offsets = ints({0, 2});

  multipack::CollateOptions options;
  options.row_len = 8;
  options.padded_tail = "last";
  options.attention_mask = "bool";
  const multipack::Batch batch = multipack::collate(tokens, offsets, index, row_offsets, options);
  check(batch.input_ids.equal(ints({11, 12, 13, 21, 22, 0, 0, 0}).unsqueeze(0)), "input_ids");
  check(
      batch.labels.equal(ints({-100, 12, 13, -100, 22, -100, -100, -100}).unsqueeze(0)), "labels");
  check(batch.position_ids.equal(ints({0, 1, 2, 0, 1, 2, 3, 4}).unsqueeze(0)), "position_ids");
  check(batch.cu_seqlens.equal(ints({0, 3, 8}).to(at::kInt)), "cu_seqlens");
  check(batch.max_seqlen.item<int32_t>() == 5, "max_seqlen");
  check(batch.attention_mask.equal(multipack::block_mask(batch.segment_ids)), "attention_mask");
  check(multipack::boundaries(batch.position_ids).equal(batch.cu_seqlens), "boundaries");

  const std::vector<at::Tensor> samples = {ints({11, 12, 13}), ints({21, 22})};
  check(
      multipack::collate_list(samples, row_offsets, options).input_ids.equal(batch.input_ids),
      "collate_list");
  check(
      multipack::pack_values(tokens, offsets, index, row_offsets, options).equal(batch.input_ids),
      "pack_values");
  check(multipack::label_counts(tokens, offsets).counts.equal(ints({2, 1})), "label_counts");

  // Heads of size 4; the mask form wants heads first.
  const at::Tensor q = at::rand({8, 2, 4});
  at::Tensor k = at::rand({8, 1, 4}).requires_grad_();
  multipack::AttentionOptions look;
  look.max_seqlen = batch.max_seqlen.item<int32_t>();
  look.window = 2;
  const at::Tensor last = ints({1, 1, 1, 2, 2, 2, 2, 2}); // the padding is the last sample's here
  const at::Tensor seen = multipack::attention(q, k, k, batch.cu_seqlens, look);
  const at::Tensor keys = k.expand({8, 2, 4}).transpose(0, 1);
  const at::Tensor masked = at::scaled_dot_product_attention(
      q.transpose(0, 1), keys, keys, multipack::block_mask(last, true, 2).squeeze(0));
  check(at::allclose(seen, masked.transpose(0, 1)), "attention");
  seen.sum().backward();
  check(k.grad().sizes() == k.sizes(), "the gradient of attention");

  const multipack::Plan plan =
      multipack::plan(ints({3, 2, 9}), std::nullopt, std::nullopt, "{\"sequence_len\": 8}");
  const multipack::Microbatch first =
      multipack::microbatch(plan.index, plan.row_offsets, plan.batch_offsets, 1, 0, 0);
  check(first.row_offsets.equal(ints({0, 2})), "plan and microbatch");
  check(
      multipack::resolve_config("{}").find("\"world_size\":1") != std::string::npos,
      "resolve_config");

  std::string message;
  try {
    multipack::collate(tokens, offsets, ints({5}), ints({0, 1}));
  } catch (const c10::IndexError& error) {
    message = error.what_without_backtrace();
  }
  check(
      message == "index[0] is 5, but samples are numbered from 0 and there are 2",
      "IndexError: " + message);

  message.clear();
  try {
    multipack::resolve_config("{\"s\xe9quence\": 8}");
  } catch (const c10::ValueError& error) {
    message = error.what_without_backtrace();
  }
  check(message == "a string argument is not UTF-8", "ValueError: " + message);

  torch::jit::Module module = torch::jit::load(arguments[1]);
  const at::Tensor labels = tokens.add(100);
  const std::string config = "{\"sequence_len\": 8}";
  const auto found = module.forward({tokens, labels, offsets, config, 0}).toTuple()->elements();
  const multipack::LabelCounts counted = multipack::label_counts(labels, offsets);
  const multipack::Plan planned =
      multipack::plan(offsets.diff(), counted.counts, counted.starts, config);
  const multipack::Microbatch chosen =
      multipack::microbatch(planned.index, planned.row_offsets, planned.batch_offsets, 1, 0, 0);
  multipack::CollateOptions masked_batch;
  masked_batch.attention_mask = "bool";
  const multipack::Batch made =
      multipack::collate(tokens, offsets, chosen.index, chosen.row_offsets, masked_batch, labels);
  check(found.size() == 4, "the results of the TorchScript file");
  check(found[0].toTensor().equal(made.input_ids), "its input_ids");
  check(found[1].toTensor().equal(made.labels), "its labels");
  check(found[2].toTensor().equal(made.cu_seqlens), "its cu_seqlens");
  check(found[3].toTensor().equal(made.attention_mask), "its attention_mask");
  check(made.input_ids.sizes() == at::IntArrayRef({1, 5}), "both samples in a row");

  std::cout << "all checks hold" << std::endl;
  return 0;
}
