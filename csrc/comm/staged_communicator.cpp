#include <ATen/core/grad_mode.h>

#include <utility>

#include "comm/communicator.h"
#include "comm/ready_work.h"

namespace muster::comm {
namespace {

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(CommunicatorPtr host, c10::Device device, CommunicatorPtr direct)
      : Communicator({.rank = host->rank(), .size = host->size(), .device = device}),
        host_(std::move(host)),
        direct_(std::move(direct)) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override { return host_->allocate(numel, dtype); }

  Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag, const Receivers& receivers) override {
    return in_place(tensor, [&](const at::Tensor& copy) { return host_->all_reduce(copy, op, tag, receivers); });
  }
  Work broadcast(const at::Tensor& tensor, int source) override {
    if (direct_ && tensor.device() == device()) return direct_->broadcast(tensor, source);
    return in_place(tensor, [&](const at::Tensor& copy) { return host_->broadcast(copy, source); });
  }
  Work all_gather(const at::Tensor& input, GatherSizes /*sizes*/) override {
    if (input.device().is_cpu()) return host_->all_gather(input);
    Work work = host_->all_gather(input.cpu());
    work.wait();
    std::vector<at::Tensor> outputs;
    for (const auto& output : work.outputs()) {
      outputs.push_back(output.defined() ? output.to(input.device()) : at::Tensor());
    }
    return ready_work(std::move(outputs));
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    if (input.device().is_cpu()) return host_->reduce_scatter(output, input, op);
    return in_place(output, [&](const at::Tensor& copy) { return host_->reduce_scatter(copy, input.cpu(), op); });
  }
  Work barrier() override { return host_->barrier(); }

  void begin_scope(uint64_t scope, QueuedOperations* /*queue*/) override { host_->begin_scope(scope); }
  Work end_scope(ScopeEnd end, const std::string& reason) override { return host_->end_scope(end, reason); }
  void abort(const std::string& reason) noexcept override { host_->abort(reason); }

 private:
  template <class Issue>
  static Work in_place(const at::Tensor& tensor, const Issue& issue) {
    if (tensor.device().is_cpu()) return issue(tensor);
    const at::NoGradGuard no_grad;
    const auto copy = tensor.cpu();
    issue(copy).wait();
    tensor.copy_(copy);
    return Work();
  }

  const CommunicatorPtr host_;
  const CommunicatorPtr direct_;  // null: there is none
};

}  // namespace

CommunicatorPtr make_staged(CommunicatorPtr host, c10::Device device, CommunicatorPtr direct) {
  return std::make_shared<StagedCommunicator>(std::move(host), device, std::move(direct));
}

}  // namespace muster::comm
