#include "comm/noting_communicator.h"

#include <string>
#include <utility>

namespace muster::comm {
namespace {

class NotingCommunicator final : public Communicator {
 public:
  NotingCommunicator(CommunicatorPtr group, std::function<void()> note)
      : Communicator({.rank = group->rank(), .size = group->size(), .device = group->device()}, group->peer_memory()),
        group_(std::move(group)),
        note_(std::move(note)) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override { return group_->allocate(numel, dtype); }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag, const Receivers& receivers) override {
    return noted(group_->all_reduce(tensor, op, tag, receivers));
  }
  Work broadcast(const at::Tensor& tensor, int source) override { return noted(group_->broadcast(tensor, source)); }
  Work all_gather(const at::Tensor& input, GatherSizes sizes) override {
    return noted(group_->all_gather(input, sizes));
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    return noted(group_->reduce_scatter(output, input, op));
  }
  Work barrier() override { return noted(group_->barrier()); }
  void begin_scope(uint64_t scope, QueuedOperations* queue) override { group_->begin_scope(scope, queue); }
  Work end_scope(ScopeEnd end, const std::string& reason) override { return group_->end_scope(end, reason); }
  void abort(const std::string& reason) noexcept override { group_->abort(reason); }

 private:
  Work noted(Work work) const {
    note_();
    return work;
  }

  const CommunicatorPtr group_;
  const std::function<void()> note_;
};

}  // namespace

CommunicatorPtr make_noting(CommunicatorPtr group, std::function<void()> note) {
  return std::make_shared<NotingCommunicator>(std::move(group), std::move(note));
}

}  // namespace muster::comm
