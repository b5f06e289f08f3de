// The contract of a backend that moves data by itself; ExchangeCommunicator makes a Communicator of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace muster::comm {

/// Collectives that all ranks issue in the same order with the same sizes; nothing is compared here. Several may be
/// under way. Tensors are one-dimensional, contiguous and not empty. Externally synchronised, except abort().
class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual c10::Device device() const noexcept = 0;
  /// The worker that rank `rank` lives in.
  virtual int worker_of(int rank) const noexcept = 0;

  /// Zeroed memory for a tensor that will be communicated, where that is fastest; collective where it is shared.
  virtual at::Tensor allocate(int64_t numel, at::ScalarType dtype);
  /// In place; fp32, fp64, int32, int64 and uint8.
  virtual Work all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  virtual Work broadcast(const at::Tensor& tensor, int source) = 0;
  /// outputs[r] becomes rank r's input; all of one size.
  virtual Work gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) = 0;

  /// Ends waits of this rank with CommError(reason), and of its peers where the backend can. Thread-safe.
  virtual void abort(const std::string& reason) noexcept = 0;
};

/// A Communicator over `transport`. With `check`, ranks exchange their requests before every operation, so that
/// disagreement is LayoutMismatch; without, it shows as an error of the backend or as Timeout, and a size that differs
/// may go unnoticed. barrier, all_gather (whose parts may differ) and operations in scopes exchange requests in any
/// case, so that what begins with one of these is compared with what other ranks begin; end_scope then blocks until all
/// ranks have ended the scope. Sums follow the transport's own order; bf16 and fp16 are summed in fp32. reduce_scatter
/// costs an all_reduce.
CommunicatorPtr make_exchange_communicator(std::shared_ptr<Transport> transport, bool check, Milliseconds timeout);

}  // namespace muster::comm
