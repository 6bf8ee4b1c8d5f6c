// Trains a small causal transformer on packed batches, in C++ alone: reads tokens, counts labels,
// plans and balances, takes its microbatches, builds their tensors, trains, saves and goes on.
//
//   python examples/cpp/trainer.py make data.pt
//   build/cpp/trainer data.pt runs/one
//   build/cpp/trainer data.pt runs/two --attention sdpa
//
// examples/cpp/trainer.py is the same trainer with multipack's Python classes: from the same seed
// both come to the same plans, batches and losses.
//
// The data is one file, a dict of tensors as torch.save writes it in Python. `tokens` and `labels`,
// (T,) int32 or int64, hold all samples end to end, -100 where there is nothing to learn;
// `offsets`, (N + 1,), says where each begins, and where the last ends.
//
// With --attention multipack the layers are told where samples begin; with sdpa they get the 4D
// mask, which takes L * L entries a row and computes them all. The losses are the same.
//
// The folder gets `checkpoint.pt`: run again with the same arguments the trainer goes on from it,
// to the same weights as without a stop, bit for bit. At the end it gets `weights.pt`, which Python
// reads as `dict(torch.load("weights.pt"))`.
//
// This is one process. To train on several, give each its number as RANK, and sum `labels` and the
// gradients over them once a step, with c10d; plans need no communication.
#include <multipack/multipack.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>
#include <torch/serialize/archive.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t VOCABULARY = 100;
constexpr int64_t WIDTH = 32;
constexpr int64_t HEADS = 2;
constexpr int64_t LAYERS = 2;

// What the trainer itself needs of the settings; config() names them all to the planner.
constexpr int64_t SEQUENCE_LEN = 64;
constexpr int64_t ACCUMULATION = 2;
constexpr int64_t WORLD_SIZE = 1;
constexpr int64_t RANK = 0;

std::string config() {
  return "{\"sequence_len\": " + std::to_string(SEQUENCE_LEN) +
         ", \"micro_batch_size\": 4, \"balance_labels\": true, \"gradient_accumulation_steps\": " +
         std::to_string(ACCUMULATION) + ", \"world_size\": " + std::to_string(WORLD_SIZE) + "}";
}

struct Arguments {
  std::string data;
  std::filesystem::path folder;
  std::string attention = "multipack"; // or "sdpa"
  double dropout = 0;
  int64_t epochs = 2;
  int64_t steps = std::numeric_limits<int64_t>::max(); // of this run, at most
  int64_t save_every = 10;                             // steps
  std::string record; // a file for the plans and batches of this run, or none
};

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  std::vector<std::string> places;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i].rfind("--", 0) != 0) {
      places.push_back(words[i]);
      continue;
    }
    if (i + 1 == words.size()) {
      throw std::invalid_argument(words[i] + " wants a value");
    }
    const std::string &name = words[i], &value = words[++i];
    if (name == "--attention" && (value == "multipack" || value == "sdpa")) {
      arguments.attention = value;
    } else if (name == "--dropout") {
      arguments.dropout = std::stod(value);
    } else if (name == "--epochs") {
      arguments.epochs = std::stoll(value);
    } else if (name == "--steps") {
      arguments.steps = std::stoll(value);
    } else if (name == "--save-every") {
      arguments.save_every = std::max(1LL, std::stoll(value));
    } else if (name == "--record") {
      arguments.record = value;
    } else {
      throw std::invalid_argument("not understood: " + name + " " + value);
    }
  }
  if (places.size() != 2) {
    throw std::invalid_argument(
        "usage: trainer DATA FOLDER [--attention multipack|sdpa] [--dropout P] [--epochs N] "
        "[--steps N] [--save-every N] [--record FILE]");
  }
  arguments.data = places[0];
  arguments.folder = places[1];
  return arguments;
}

// Tensors by name, which torch.save and torch.load call a dict.
using Tensors = std::map<std::string, Tensor>;

Tensors read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Tensors tensors;
  for (const auto& entry : torch::jit::pickle_load(bytes).toGenericDict()) {
    tensors[entry.key().toStringRef()] = entry.value().toTensor();
  }
  return tensors;
}

// Pairs and not a dict: C++ notes the type of a dict beside it, which torch.load does not allow.
void write(const std::string& path, const Tensors& tensors) {
  std::vector<c10::IValue> pairs;
  for (const auto& [name, tensor] : tensors) {
    pairs.emplace_back(std::make_tuple(name, tensor));
  }
  const std::vector<char> bytes =
      torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(pairs)));
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) {
    throw std::runtime_error("cannot write " + path);
  }
}

// Attention within the samples of a batch: (R, L, 3, H, D) to (R, L, H, D).
Tensor attend(const Tensor& qkv, const multipack::Batch& batch) {
  if (batch.attention_mask.numel() > 0) {
    // Heads before tokens, and the mask for each of them.
    const auto parts = qkv.permute({2, 0, 3, 1, 4}).unbind();
    return at::scaled_dot_product_attention(parts[0], parts[1], parts[2], batch.attention_mask)
        .transpose(1, 2);
  }
  // The rows end to end, as cu_seqlens counts them.
  const auto parts = qkv.flatten(0, 1).unbind(1);
  multipack::AttentionOptions options;
  options.max_seqlen = batch.max_seqlen.item<int32_t>();
  return multipack::attention(parts[0], parts[1], parts[2], batch.cu_seqlens, options)
      .unflatten(0, qkv.sizes().slice(0, 2));
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double dropout) : dropout(dropout) {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
  }

  Tensor forward(Tensor x, const multipack::Batch& batch) {
    const Tensor heads = qkv(norm1(x)).unflatten(-1, {3, HEADS, WIDTH / HEADS});
    x = x + at::dropout(out(attend(heads, batch).flatten(2)), dropout, is_training());
    return x + at::dropout(down(at::gelu(up(norm2(x)))), dropout, is_training());
  }

  double dropout;
  torch::nn::LayerNorm norm1{torch::nn::LayerNormOptions({WIDTH})};
  torch::nn::Linear qkv{WIDTH, 3 * WIDTH};
  torch::nn::Linear out{WIDTH, WIDTH};
  torch::nn::LayerNorm norm2{torch::nn::LayerNormOptions({WIDTH})};
  torch::nn::Linear up{WIDTH, 4 * WIDTH};
  torch::nn::Linear down{4 * WIDTH, WIDTH};
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(double dropout) {
    register_module("tokens", tokens);
    register_module("positions", positions);
    for (int64_t layer = 0; layer < LAYERS; ++layer) {
      blocks.push_back(register_module("block" + std::to_string(layer), Block(dropout)));
    }
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({WIDTH})));
    head = register_module("head", torch::nn::Linear(WIDTH, VOCABULARY));
  }

  // Logits, (R, L, VOCABULARY). Positions begin anew with every sample.
  Tensor forward(const multipack::Batch& batch) {
    Tensor x = tokens(batch.input_ids) + positions(batch.position_ids);
    for (auto& block : blocks) {
      x = block(x, batch);
    }
    return head(norm(x));
  }

  torch::nn::Embedding tokens{VOCABULARY, WIDTH};
  torch::nn::Embedding positions{SEQUENCE_LEN, WIDTH};
  std::vector<Block> blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Model);

// Adds up the gradients of a step's microbatches; returns the loss for each label. It is the sum
// over all labels of the step, divided by their number: the mean of the microbatches' means would
// weigh a label by the company that it happens to be in.
double accumulate(Model& model, const std::vector<multipack::Batch>& microbatches) {
  int64_t labels = 0;
  for (const auto& batch : microbatches) {
    // The first label of a row has nothing that predicts it.
    labels += batch.labels.slice(1, 1).ne(-100).sum().item<int64_t>();
  }
  double total = 0;
  for (const auto& batch : microbatches) {
    const Tensor logits = model(batch).slice(1, 0, -1).flatten(0, 1);
    const Tensor loss =
        at::cross_entropy_loss(logits, batch.labels.slice(1, 1).flatten(), {}, at::Reduction::Sum) /
        std::max<int64_t>(labels, 1);
    loss.backward();
    total += loss.item<double>();
  }
  return total;
}

// Where training stands: all that a run needs to go on as if it had not stopped.
struct Position {
  int64_t step = 0; // done in all
  int64_t epoch = 0;
  int64_t next = 0; // the next microbatch of the epoch
  Tensor report;    // of the epoch's plan: it names settings and data
};

Tensor random_state() {
  return at::globalContext().defaultGenerator(at::kCPU).get_state();
}

// Written whole under another name, then renamed: a kill leaves the old checkpoint or the new one.
void save(
    const std::filesystem::path& path,
    const Model& model,
    const torch::optim::Optimizer& optimizer,
    const Position& position) {
  torch::serialize::OutputArchive archive, weights, moments;
  model->save(weights);
  optimizer.save(moments);
  archive.write("model", weights);
  archive.write("optimizer", moments);
  archive.write("random", random_state());
  archive.write("step", c10::IValue(position.step));
  archive.write("epoch", c10::IValue(position.epoch));
  archive.write("next", c10::IValue(position.next));
  archive.write("report", position.report);
  const std::filesystem::path partial = path.string() + ".partial";
  archive.save_to(partial.string());
  std::filesystem::rename(partial, path);
}

Position load(const std::filesystem::path& path, Model& model, torch::optim::Optimizer& optimizer) {
  torch::serialize::InputArchive archive, weights, moments;
  archive.load_from(path.string());
  archive.read("model", weights);
  archive.read("optimizer", moments);
  model->load(weights);
  optimizer.load(moments);
  Tensor random;
  archive.read("random", random);
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_state(random);
  c10::IValue step, epoch, next;
  archive.read("step", step);
  archive.read("epoch", epoch);
  archive.read("next", next);
  Position position{step.toInt(), epoch.toInt(), next.toInt(), {}};
  archive.read("report", position.report);
  return position;
}

void train(const Arguments& arguments) {
  const Tensors data = read(arguments.data);
  const Tensor &tokens = data.at("tokens"), &labels = data.at("labels");
  const Tensor& offsets = data.at("offsets");
  const multipack::LabelCounts counts = multipack::label_counts(labels, offsets);

  multipack::CollateOptions layout;
  layout.max_sample_len = SEQUENCE_LEN;
  layout.attention_mask = arguments.attention == "sdpa" ? "bool" : "none";

  torch::manual_seed(0);
  Model model(arguments.dropout);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  Position position;
  std::filesystem::create_directories(arguments.folder);
  const auto checkpoint = arguments.folder / "checkpoint.pt";
  if (std::filesystem::exists(checkpoint)) {
    position = load(checkpoint, model, optimizer);
  }

  Tensors record;
  int64_t steps_left = arguments.steps;
  for (; position.epoch < arguments.epochs && steps_left > 0; ++position.epoch) {
    const multipack::Plan plan =
        multipack::plan(offsets.diff(), counts.counts, counts.starts, config(), position.epoch);
    if (position.next > 0 && !position.report.equal(plan.report)) {
      throw std::runtime_error(checkpoint.string() + " is of other data or settings");
    }
    position.report = plan.report;
    const int64_t microbatches = (plan.batch_offsets.numel() - 1) / WORLD_SIZE;
    if (!arguments.record.empty()) {
      const std::string name = "plan" + std::to_string(position.epoch);
      record[name + ".index"] = plan.index;
      record[name + ".row_offsets"] = plan.row_offsets;
      record[name + ".batch_offsets"] = plan.batch_offsets;
    }
    while (position.next < microbatches && steps_left > 0) {
      std::vector<multipack::Batch> step;
      // The last step of an epoch may have fewer microbatches.
      for (int64_t i = 0; i < ACCUMULATION && position.next < microbatches; ++i) {
        const multipack::Microbatch samples = multipack::microbatch(
            plan.index, plan.row_offsets, plan.batch_offsets, WORLD_SIZE, RANK, position.next++);
        step.push_back(
            multipack::collate(
                tokens, offsets, samples.index, samples.row_offsets, layout, labels));
      }
      const double loss = accumulate(model, step);
      optimizer.step();
      optimizer.zero_grad();
      ++position.step;
      --steps_left;
      std::printf("step %lld loss %.9g\n", static_cast<long long>(position.step), loss);

      if (!arguments.record.empty()) {
        for (size_t i = 0; i < step.size(); ++i) {
          const std::string name =
              "step" + std::to_string(position.step) + "." + std::to_string(i) + ".";
          record[name + "input_ids"] = step[i].input_ids;
          record[name + "labels"] = step[i].labels;
          record[name + "position_ids"] = step[i].position_ids;
          record[name + "cu_seqlens"] = step[i].cu_seqlens;
        }
      }
      if (position.step % arguments.save_every == 0 || position.next == microbatches ||
          steps_left == 0) {
        save(checkpoint, model, optimizer, position);
      }
    }
    if (position.next < microbatches) {
      break;
    }
    position.next = 0;
  }
  if (!arguments.record.empty()) {
    write(arguments.record, record);
  }
  Tensors weights;
  for (const auto& parameter : model->named_parameters()) {
    weights[parameter.key()] = parameter.value().detach();
  }
  write((arguments.folder / "weights.pt").string(), weights);
}

} // namespace

int main(int count, char** words) {
  try {
    train(parse({words + 1, words + count}));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "trainer: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trainer: %s\n", error.what());
    return 1;
  }
  return 0;
}
