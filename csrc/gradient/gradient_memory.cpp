#include "gradient/gradient_memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "muster/error.h"

namespace muster {

// Blocks of each size: one per gradient of it, plus one for the temporary that autograd computes it from.
struct GradientMemory::Pool {
  struct Blocks {
    size_t not_made = 1;
    std::vector<at::Tensor> free;
  };

  std::mutex mutex;
  comm::CommunicatorPtr communicator;  // guarded by mutex; null once no more blocks are made
  std::map<size_t, Blocks> by_size;    // guarded by mutex

  at::Tensor take(size_t bytes) {
    const std::lock_guard lock(mutex);
    const auto found = by_size.find(bytes);
    if (found == by_size.end()) return {};
    auto& blocks = found->second;
    if (blocks.free.empty()) {
      if (blocks.not_made == 0 || !communicator) return {};
      --blocks.not_made;
      try {
        return communicator->allocate(static_cast<int64_t>(bytes), at::kByte);
      } catch (const Error&) {  // there is other memory; who communicates next learns of a failed group
        communicator.reset();
        return {};
      }
    }
    auto block = std::move(blocks.free.back());
    blocks.free.pop_back();
    return block;
  }

  void give_back(at::Tensor block) {
    const std::lock_guard lock(mutex);
    if (communicator) by_size[block.nbytes()].free.push_back(std::move(block));
  }
};

/// In place of torch's CPU allocator, which it calls for all that no scope gives.
class GradientMemory::Allocator final : public c10::Allocator {
 public:
  static thread_local const std::shared_ptr<Pool>* in_scope;  // of this thread; null outside

  /// Takes torch's place once, for good.
  static Allocator& install() {
    static auto& allocator = *new Allocator(*c10::GetCPUAllocator());  // outlives every tensor
    return allocator;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (in_scope == nullptr) return before_.allocate(bytes);
    const auto* const scope = std::exchange(in_scope, nullptr);  // a new block may come from here
    auto block = (*scope)->take(bytes);
    in_scope = scope;
    if (!block.defined()) return before_.allocate(bytes);
    void* const data = block.mutable_data_ptr();
    const std::lock_guard lock(mutex_);
    leases_[data] = {*scope, std::move(block)};
    return {data, data, &free, c10::DeviceType::CPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return before_.raw_deleter() == nullptr ? nullptr : &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { before_.copy_data(to, from, bytes); }

 private:
  struct Lease {
    std::shared_ptr<Pool> pool;
    at::Tensor block;
  };

  explicit Allocator(c10::Allocator& before) : before_(before) { c10::SetCPUAllocator(this); }

  static void free(void* data) {
    auto& allocator = install();
    Lease lease;
    {
      const std::lock_guard lock(allocator.mutex_);
      const auto found = allocator.leases_.find(data);
      if (found != allocator.leases_.end()) {
        lease = std::move(found->second);
        allocator.leases_.erase(found);
      }
    }
    if (lease.pool) {
      lease.pool->give_back(std::move(lease.block));
    } else {
      allocator.before_.raw_deleter()(data);  // as raw_allocate() gave it
    }
  }

  c10::Allocator& before_;
  std::mutex mutex_;
  std::unordered_map<void*, Lease> leases_;  // by address; guarded by mutex_
};

thread_local const std::shared_ptr<GradientMemory::Pool>* GradientMemory::Allocator::in_scope = nullptr;

/// What open() opened last in a thread: the GradientMemory may end before close(), and so may the thread.
struct GradientMemory::Opened {
  std::shared_ptr<Pool> pool;
  ~Opened() { close(); }
};

GradientMemory::GradientMemory(comm::CommunicatorPtr communicator, const std::vector<size_t>& bytes)
    : pool_(std::make_shared<Pool>()) {
  pool_->communicator = std::move(communicator);
  for (const size_t size : bytes) ++pool_->by_size[size].not_made;
  if (!pool_->by_size.empty()) Allocator::install();
}

GradientMemory::~GradientMemory() { end(); }

void GradientMemory::end() noexcept {
  const std::lock_guard lock(pool_->mutex);
  pool_->communicator.reset();
  pool_->by_size.clear();
}

void GradientMemory::open() const {
  thread_local Opened opened;
  opened.pool = pool_;
  Allocator::in_scope = &opened.pool;
}

void GradientMemory::close() noexcept { Allocator::in_scope = nullptr; }

GradientMemory::Scope::Scope(GradientMemory* memory) noexcept {
  if (memory != nullptr) Allocator::in_scope = &memory->pool_;
}

GradientMemory::Scope::~Scope() { close(); }

}  // namespace muster
