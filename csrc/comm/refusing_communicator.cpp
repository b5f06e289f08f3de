#include <utility>

#include "comm/communicator.h"

namespace muster::comm {
namespace {

class RefusingCommunicator final : public Communicator {
 public:
  RefusingCommunicator(int rank, int size, std::string reason)
      : Communicator({.rank = rank, .size = size}), reason_(std::move(reason)) {}

  at::Tensor allocate(int64_t, at::ScalarType) override { refuse(); }
  Work all_reduce(const at::Tensor&, ReduceOp, uint64_t, const Receivers&) override { refuse(); }
  Work broadcast(const at::Tensor&, int) override { refuse(); }
  Work all_gather(const at::Tensor&, GatherSizes) override { refuse(); }
  Work reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp) override { refuse(); }
  Work barrier() override { refuse(); }
  void begin_scope(uint64_t, QueuedOperations*) override {}
  Work end_scope(ScopeEnd, const std::string&) override { return Work(); }
  void abort(const std::string&) noexcept override {}

 private:
  [[noreturn]] void refuse() const { throw CommError(reason_); }

  const std::string reason_;
};

}  // namespace

CommunicatorPtr make_refusing(int rank, int size, const std::string& reason) {
  return std::make_shared<RefusingCommunicator>(rank, size, reason);
}

}  // namespace muster::comm
