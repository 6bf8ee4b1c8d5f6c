// Tensors as the Rust side reads and makes them: see src/torch/handle.rs.
//
// Large tensors, which are masks, have memory of their own kind. The first write to each page of
// new memory goes through the system, which clears it. In pages of 4 KiB that takes longer than all
// the rest: on one virtual machine 27 ms for a mask of 64 MiB, which takes 5 ms to fill a second
// time. In huge pages, which most systems give only to those who ask, it is 8 ms, and up to 40
// where the machine gives free memory back to its host and has to ask for it again. So the memory
// of the last large tensor is kept for the next: a training wants a mask of the same size in every
// step, and drops it soon. Where the system is short of memory, it takes what is kept.
#include "multipack/cpp/tensor.h"
#include "multipack/src/torch/bridge.rs.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace multipack::ffi {
namespace {

// From so many bytes on a tensor is large: the most that glibc's malloc keeps for itself. The
// memory of larger ones comes from the system anew each time, unless it is kept elsewhere.
constexpr size_t large = 32 << 20;

// The size of a huge page on x86-64, and on aarch64 with pages of 4 KiB. Where it is another, the
// advice covers less or nothing, and that is all.
constexpr size_t huge_page = 2 << 20;

// The memory of a large tensor.
struct Block {
  void* start;
  size_t bytes;
  pid_t process;
};

// That of the last one, if nobody has it. A forked child inherits it, and pages that it would have
// to copy: it takes none that another process made.
std::atomic<Block*> kept{nullptr};

void release(Block* block) {
  if (block != nullptr) {
    std::free(block->start);
    delete block;
  }
}

void keep(void* context) {
  auto* const block = static_cast<Block*>(context);
#ifdef MADV_FREE
  // The system may have the pages when it is short of memory, and leaves them otherwise.
  madvise(block->start, block->bytes, MADV_FREE);
#endif
  release(kept.exchange(block));
}

// Null if there is not so much memory.
Block* block_of(size_t bytes) {
  Block* const last = kept.exchange(nullptr);
  if (last != nullptr && last->process == getpid() && last->bytes >= bytes &&
      last->bytes / 2 <= bytes) {
    return last;
  }
  release(last);
  const size_t whole = (bytes + huge_page - 1) / huge_page * huge_page;
  void* const start = std::aligned_alloc(huge_page, whole);
  if (start == nullptr) {
    return nullptr;
  }
#ifdef MADV_HUGEPAGE
  madvise(start, whole, MADV_HUGEPAGE);
#endif
  return new Block{start, whole, getpid()};
}

// Memory for a large tensor; null if it is not large, or there is not so much memory.
Block* large_block_of(c10::IntArrayRef shape, size_t element_size) {
  size_t bytes = element_size;
  for (const int64_t length : shape) {
    // Torch says what is wrong with such a shape.
    if (length < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(length), &bytes)) {
      return nullptr;
    }
  }
  return bytes >= large && bytes <= PTRDIFF_MAX ? block_of(bytes) : nullptr;
}

} // namespace

// In one call, because a batch of a few hundred tensors is looked at in less time than it takes to
// ask tch for the device, dtype, dimensions, layout and memory of each, one by one.
View look(const at::Tensor& tensor) {
  View view{};
  if (!tensor.defined()) {
    return view;
  }
  view.on_cpu = tensor.is_cpu();
  view.dtype = static_cast<int8_t>(tensor.scalar_type());
  view.dimensions = static_cast<size_t>(tensor.dim());
  if (view.on_cpu && tensor.layout() == at::kStrided && tensor.has_storage()) {
    view.len = static_cast<size_t>(tensor.numel());
    view.element_size = tensor.itemsize();
    view.address = reinterpret_cast<size_t>(tensor.const_data_ptr());
    // Memory from elsewhere, such as torch.frombuffer with an odd offset, may be unaligned.
    // Complex numbers are two of the half size, and aligned as these.
    const size_t alignment = std::min<size_t>(view.element_size, 8);
    view.readable = tensor.is_contiguous() && view.address % alignment == 0;
  }
  return view;
}

// Not through the dispatcher, which takes longer than the allocation: a batch has eight tensors.
std::unique_ptr<at::Tensor> fresh(rust::Slice<const int64_t> size, int8_t dtype) {
  const c10::IntArrayRef shape(size.data(), size.size());
  const auto type = static_cast<at::ScalarType>(dtype);
  Block* const block = large_block_of(shape, c10::elementSize(type));
  if (block == nullptr) {
    return std::make_unique<at::Tensor>(at::detail::empty_cpu(shape, type));
  }
  // With an allocator the tensor can be resized, as those that torch makes.
  return std::make_unique<at::Tensor>(at::for_blob(block->start, shape)
                                          .context(block, &keep)
                                          .options(at::TensorOptions(type))
                                          .allocator(c10::GetCPUAllocator())
                                          .resizeable_storage()
                                          .make_tensor());
}

} // namespace multipack::ffi
