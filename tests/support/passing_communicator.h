// A communicator that passes on what is asked of it.
#pragma once

#include <atomic>
#include <string>
#include <utility>

#include "comm/communicator.h"

namespace muster::testing {

/// For tests that look at some of it.
class PassingCommunicator : public comm::Communicator {
 public:
  explicit PassingCommunicator(comm::CommunicatorPtr other)
      : Communicator({.rank = other->rank(), .size = other->size(), .device = other->device()}),
        other_(std::move(other)) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override { return other_->allocate(numel, dtype); }
  comm::Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag,
                        const comm::Receivers& receivers) override {
    return other_->all_reduce(tensor, op, tag, receivers);
  }
  comm::Work broadcast(const at::Tensor& tensor, int source) override { return other_->broadcast(tensor, source); }
  comm::Work all_gather(const at::Tensor& input, comm::GatherSizes sizes) override {
    return other_->all_gather(input, sizes);
  }
  comm::Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    return other_->reduce_scatter(output, input, op);
  }
  comm::Work barrier() override { return other_->barrier(); }
  void begin_scope(uint64_t scope, comm::QueuedOperations* queue) override { other_->begin_scope(scope, queue); }
  comm::Work end_scope(comm::ScopeEnd end, const std::string& reason) override {
    return other_->end_scope(end, reason);
  }
  void abort(const std::string& reason) noexcept override { other_->abort(reason); }

 private:
  const comm::CommunicatorPtr other_;
};

/// Counts gathers.
class CountedCommunicator final : public PassingCommunicator {
 public:
  using PassingCommunicator::PassingCommunicator;

  /// Since the last call.
  int take_gathers() { return gathers_.exchange(0); }

  comm::Work all_gather(const at::Tensor& input, comm::GatherSizes sizes) override {
    ++gathers_;
    return PassingCommunicator::all_gather(input, sizes);
  }

 private:
  std::atomic<int> gathers_ = 0;
};

}  // namespace muster::testing
