#include "comm/request.h"

#include <algorithm>

#include "core/plain_memory.h"
#include "device/kernel_dtype.h"
#include "muster/error.h"

namespace muster::comm {

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
    default:
      return "mean";
  }
}

namespace {

void check_dense(const at::Tensor& tensor, const char* what) {
  if (!tensor.defined() || !tensor.is_non_overlapping_and_dense()) {
    throw InvalidArgument(std::string(what) + " needs a dense tensor without gaps; call contiguous() first");
  }
}

void check_plain(const at::Tensor& tensor, const char* what) {
  if (!is_lazy(tensor)) return;
  throw InvalidArgument(std::string(what) +
                        " reads memory as it is, and this tensor's conjugation or negation is not done there yet; call "
                        "resolve_conj() and resolve_neg() first");
}

void set_shape(Request& request, const at::Tensor& tensor) {
  request.ndim = static_cast<int8_t>(tensor.dim());
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), request.sizes);
}

Request of(OpKind kind, const at::Tensor& tensor, const char* what) {
  check_dense(tensor, what);
  check_plain(tensor, what);
  Request request;
  request.kind = kind;
  request.dtype = static_cast<int8_t>(tensor.scalar_type());
  request.numel = tensor.numel();
  if (tensor.dim() <= Request::kMaxDims) set_shape(request, tensor);
  return request;
}

Request reducing(OpKind kind, const at::Tensor& tensor, ReduceOp op, const char* what) {
  Request request = of(kind, tensor, what);
  if (op == ReduceOp::mean) {
    throw InvalidArgument(std::string(what) + " reduces by sum, min or max; divide a sum for the mean");
  }
  kernel_dtype(tensor.scalar_type());
  request.reduction = static_cast<int8_t>(op);
  return request;
}

std::string shape_of(const Request& request) {
  return c10::str("of shape ", at::IntArrayRef(request.sizes, static_cast<size_t>(request.ndim)));
}

}  // namespace

Request all_reduce_request(const at::Tensor& tensor, ReduceOp op, uint64_t tag) {
  Request request = reducing(OpKind::all_reduce, tensor, op, "all_reduce");
  request.tag = tag;
  return request;
}

Request broadcast_request(const at::Tensor& tensor, int source, int size) {
  Request request = of(OpKind::broadcast, tensor, "broadcast");
  if (source < 0 || source >= size) {
    throw InvalidArgument("broadcast from rank " + std::to_string(source) + " in a group of " + std::to_string(size) +
                          "; give a rank in [0, " + std::to_string(size) + ")");
  }
  request.source = source;
  return request;
}

Request all_gather_request(const at::Tensor& input) {
  if (!input.defined() || input.dim() > Request::kMaxDims) {
    throw InvalidArgument("all_gather takes tensors of at most " + std::to_string(Request::kMaxDims) +
                          " dimensions; flatten it first");
  }
  check_plain(input, "all_gather");
  Request request;
  request.kind = OpKind::all_gather;
  request.dtype = static_cast<int8_t>(input.scalar_type());
  request.numel = input.numel();
  set_shape(request, input);
  return request;
}

Request reduce_scatter_request(const at::Tensor& output, const at::Tensor& input, ReduceOp op, int size) {
  Request request = reducing(OpKind::reduce_scatter, input, op, "reduce_scatter");
  check_dense(output, "reduce_scatter");
  if (output.scalar_type() != input.scalar_type() || output.numel() * size != input.numel()) {
    throw InvalidArgument("reduce_scatter needs an input of " + std::to_string(size) +
                          " times the output's elements and of its dtype; got " + std::to_string(input.numel()) +
                          " and " + std::to_string(output.numel()) + " elements");
  }
  return request;
}

Request visit_request(const at::Tensor& tensor, uint64_t tag) {
  Request request = of(OpKind::visit, tensor, "visit");
  request.tag = tag;
  return request;
}

std::string describe(const Request& request) {
  const std::string values = " of " + std::to_string(request.numel) + " " +
                             c10::toString(static_cast<c10::ScalarType>(request.dtype)) + " values";
  const std::string reduction = std::string("(") + name_of(static_cast<ReduceOp>(request.reduction)) + ")";
  switch (request.kind) {
    case OpKind::all_reduce:
      return "all_reduce" + reduction + values;
    case OpKind::broadcast:
      return "broadcast from rank " + std::to_string(request.source) + values;
    case OpKind::visit:
      return "visit" + values;
    case OpKind::reduce_scatter:
      return "reduce_scatter" + reduction + values;
    case OpKind::all_gather:
      return c10::str("all_gather ", shape_of(request), " ", static_cast<c10::ScalarType>(request.dtype));
    default:
      return "barrier";
  }
}

std::exception_ptr failed_in_scope(int worker, int rank, const std::string& who, const std::string& what,
                                   const std::string& reason) {
  const auto colon = reason.find(": ");
  const bool has_type = colon != std::string::npos;
  return std::make_exception_ptr(RemoteError(worker, rank, has_type ? reason.substr(0, colon) : std::string(),
                                             has_type ? reason.substr(colon + 2) : reason,
                                             who + " failed before it reached " + what + " of this step: " + reason));
}

std::string describe_mismatch(int rank_a, const Request& a, int rank_b, const Request& b) {
  const bool is_gather = a.kind == OpKind::all_gather;
  // In a scope the values are users'.
  const bool compares_shapes = is_gather || a.scope != 0;
  const int first_size = is_gather ? 1 : 0;
  const bool has_equal_shapes =
      a.ndim == b.ndim && (a.ndim == 0 || std::equal(a.sizes + first_size, a.sizes + a.ndim, b.sizes + first_size));
  if (a.kind == b.kind && a.dtype == b.dtype && a.reduction == b.reduction && a.source == b.source &&
      a.scope == b.scope && a.tag == b.tag && (is_gather || a.numel == b.numel) &&
      (!compares_shapes || has_equal_shapes)) {
    return {};
  }
  const auto full = [&](const Request& request) {
    std::string text = describe(request);
    if (compares_shapes && !has_equal_shapes && request.kind != OpKind::all_gather)
      text += c10::str(" ", shape_of(request));
    if (a.tag != b.tag) text += " with tag " + std::to_string(request.tag);
    if (a.scope != b.scope) {
      text += request.scope == 0 ? " outside a step's scope" : " in scope " + std::to_string(request.scope - 1);
    }
    return text;
  };
  return "ranks disagree: rank " + std::to_string(rank_a) + " asked for " + full(a) + ", rank " +
         std::to_string(rank_b) + " for " + full(b) +
         ". Every rank must issue the same collectives in the same order, on values of the same shapes; look for code "
         "that depends on the rank, or models and data that differ between ranks";
}

}  // namespace muster::comm
