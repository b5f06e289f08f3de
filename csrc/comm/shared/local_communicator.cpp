#include <ATen/ops/empty.h>

#include <bit>
#include <cstring>
#include <new>

#include "comm/shared/group.h"
#include "core/pages.h"

namespace muster::comm {
namespace {

using namespace shared;

/// One address space: an address is a pointer, and every address can be reached.
class LocalSpace final : public SharedSpace {
 public:
  explicit LocalSpace(int size)
      : SharedSpace(size, /*crosses_processes=*/false), memory_(ControlBlock::bytes_for(size)) {}

  ControlBlock& control() noexcept override { return *memory_.block; }
  int worker_of(int rank) const noexcept override { return rank; }

  at::Tensor allocate(int, int64_t numel, at::ScalarType dtype) override {
    const auto memory = at::empty({numel}, at::TensorOptions().dtype(dtype));
    prefer_huge_pages(memory.mutable_data_ptr(), memory.nbytes());
    return memory.zero_();
  }
  at::Tensor allocate_common(int64_t bytes) override { return allocate(0, bytes, at::kByte); }
  std::optional<uint64_t> address_of(int, const void* data, size_t) const noexcept override {
    return std::bit_cast<uint64_t>(data);
  }
  std::byte* at(int, uint64_t address) const noexcept override { return std::bit_cast<std::byte*>(address); }
  std::byte* staging(int) const noexcept override { return nullptr; }
  std::optional<LostWorker> find_lost() override { return std::nullopt; }

 private:
  struct Memory {
    explicit Memory(size_t bytes)
        : block(static_cast<ControlBlock*>(::operator new(bytes, std::align_val_t(alignof(ControlBlock))))) {
      std::memset(static_cast<void*>(block), 0, bytes);
    }
    ~Memory() { ::operator delete(block, std::align_val_t(alignof(ControlBlock))); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ControlBlock* const block;
  };

  Memory memory_;
};

}  // namespace

std::vector<CommunicatorPtr> make_local(int size, Milliseconds timeout) {
  if (size < 1 || size > kMaxRanks) {
    throw InvalidArgument("a local group has 1 to " + std::to_string(kMaxRanks) + " ranks, not " +
                          std::to_string(size));
  }
  const auto space = std::make_shared<LocalSpace>(size);
  std::vector<CommunicatorPtr> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(make_shared_communicator(space, r, timeout));
  return ranks;
}

}  // namespace muster::comm
