#include <ATen/ops/zeros.h>

#include <mutex>

#include "comm/communicator.h"
#include "comm/ready_work.h"
#include "comm/request.h"

namespace muster::comm {
namespace {

class SingleCommunicator final : public Communicator {
 public:
  explicit SingleCommunicator(c10::Device device) : Communicator({.device = device}) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override {
    check();
    return at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device()));
  }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag, const Receivers&) override {
    all_reduce_request(tensor, op, tag);
    return finished();
  }
  Work broadcast(const at::Tensor& tensor, int source) override {
    broadcast_request(tensor, source, 1);
    return finished();
  }
  Work all_gather(const at::Tensor& input, GatherSizes /*sizes*/) override {
    all_gather_request(input);
    check();
    return ready_work({input.clone(at::MemoryFormat::Contiguous)});
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    reduce_scatter_request(output, input, op, 1);
    check();
    const_cast<at::Tensor&>(output).copy_(input.view_as(output));
    return finished();
  }
  Work barrier() override { return finished(); }

  void begin_scope(uint64_t, QueuedOperations*) override { check(); }
  Work end_scope(ScopeEnd, const std::string&) override { return Work(); }

  void abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!is_aborted_) reason_ = reason;
    is_aborted_ = true;
  }

 private:
  void check() {
    const std::lock_guard lock(mutex_);
    if (is_aborted_) throw CommError(reason_);
  }
  Work finished() {
    check();
    return Work();
  }

  std::mutex mutex_;
  bool is_aborted_ = false;  // guarded by mutex_
  std::string reason_;       // guarded by mutex_
};

}  // namespace

CommunicatorPtr make_single(c10::Device device) { return std::make_shared<SingleCommunicator>(device); }

}  // namespace muster::comm
