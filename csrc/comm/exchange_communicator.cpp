// The Communicator over a transport that moves data by itself.
#include <ATen/ops/zeros.h>

#include <utility>

#include "comm/exchange.h"

namespace muster::comm {
namespace {

using exchange::Exchange;

class ExchangeCommunicator final : public Communicator {
 public:
  explicit ExchangeCommunicator(std::shared_ptr<Exchange> exchange)
      : Communicator({.rank = exchange->transport().rank(),
                      .size = exchange->transport().size(),
                      .device = exchange->transport().device()}),
        exchange_(std::move(exchange)) {}

  at::Tensor allocate(int64_t numel, at::ScalarType dtype) override {
    exchange_->check();
    return exchange_->transport().allocate(numel, dtype);
  }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, uint64_t tag, const Receivers&) override {
    check_device(tensor);
    return exchange_->issue(all_reduce_request(tensor, op, tag), tensor);
  }
  Work broadcast(const at::Tensor& tensor, int source) override {
    check_device(tensor);
    return exchange_->issue(broadcast_request(tensor, source, size()), tensor);
  }
  Work all_gather(const at::Tensor& input, GatherSizes /*sizes*/) override {
    check_device(input);
    return exchange_->issue(all_gather_request(input), input);
  }
  Work reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    check_device(input);
    check_device(output);
    return exchange_->issue(reduce_scatter_request(output, input, op, size()), input, output);
  }
  Work barrier() override { return exchange_->issue(Request{}, at::Tensor()); }

  void begin_scope(uint64_t scope, QueuedOperations* /*queue*/) override { exchange_->begin_scope(scope); }
  Work end_scope(ScopeEnd end, const std::string& reason) override {
    exchange_->end_scope(end, reason);
    return Work();
  }
  void abort(const std::string& reason) noexcept override { exchange_->abort(reason); }

 private:
  void check_device(const at::Tensor& tensor) const {
    if (tensor.device().type() != device().type()) {
      throw InvalidArgument("this group communicates tensors on " + device().str() + "; got one on " +
                            tensor.device().str() + ", move it first");
    }
  }

  const std::shared_ptr<Exchange> exchange_;
};

}  // namespace

at::Tensor Transport::allocate(int64_t numel, at::ScalarType dtype) {
  return at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device()));
}

CommunicatorPtr make_exchange_communicator(std::shared_ptr<Transport> transport, bool check, Milliseconds timeout) {
  return std::make_shared<ExchangeCommunicator>(std::make_shared<Exchange>(std::move(transport), check, timeout));
}

}  // namespace muster::comm
