// A request: what one rank asks of a collective, and what ranks compare before they move data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string>

#include "muster/reduce_op.h"

namespace muster::comm {

enum class OpKind : uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, barrier, visit };

/// Plain data of fixed layout without padding: it travels through shared memory and process groups.
struct Request {
  static constexpr int kMaxDims = 8;

  OpKind kind = OpKind::barrier;
  int8_t dtype = 0;      ///< c10::ScalarType
  int8_t reduction = 0;  ///< ReduceOp; of the reducing kinds
  int8_t ndim = 0;       ///< of `sizes`; 0 where there are more than kMaxDims, which all_gather refuses
  int32_t source = 0;    ///< broadcast only
  uint64_t scope = 0;    ///< 1 + the scope's id, or 0 outside
  uint64_t tag = 0;
  int64_t numel = 0;
  int64_t sizes[kMaxDims] = {};  ///< compared in scopes and by all_gather
};

/// Validates the tensors and states the request. Throws InvalidArgument: dtype without a kernel (reducing kinds),
/// `mean`, a tensor that is not dense or lazy (plain_memory.h), too many dimensions, a source or an output size that
/// does not fit.
Request all_reduce_request(const at::Tensor& tensor, ReduceOp op, uint64_t tag);
Request broadcast_request(const at::Tensor& tensor, int source, int size);
Request all_gather_request(const at::Tensor& input);
Request reduce_scatter_request(const at::Tensor& output, const at::Tensor& input, ReduceOp op, int size);
Request visit_request(const at::Tensor& tensor, uint64_t tag);

/// "sum", "mean", "min" or "max".
const char* name_of(ReduceOp op);

/// "all_reduce(sum) of 1000 Float values".
std::string describe(const Request& request);

/// The RemoteError of a peer that ended the scope as failed, with `reason` "type: text", before it reached `what`.
std::exception_ptr failed_in_scope(int worker, int rank, const std::string& who, const std::string& what,
                                   const std::string& reason);

/// What two ranks disagree about, with a remedy, or an empty string.
std::string describe_mismatch(int rank_a, const Request& a, int rank_b, const Request& b);

}  // namespace muster::comm
