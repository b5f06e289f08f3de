// The roll of an operation: which ranks take part in it, and what to do when not all of them do.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "comm/request.h"

namespace muster::comm::nccl {

/// What each rank asked for; nothing from a rank that sits the scope out.
class Roll {
 public:
  Roll() = default;  ///< nobody was asked: everyone takes part
  explicit Roll(std::vector<std::optional<Request>> requests) : requests_(std::move(requests)) {}
  /// Of `size` ranks that ask for the same.
  Roll(const Request& request, int size) : requests_(static_cast<size_t>(size), request) {}

  bool is_everyone() const noexcept;
  bool is_present(int rank) const { return requests_.empty() || requests_[static_cast<size_t>(rank)].has_value(); }
  /// Of a rank that is present, in a roll that is known.
  Request request_of(int rank) const { return requests_[static_cast<size_t>(rank)].value_or(Request()); }

  /// Whether all ask for as many values, so that one all_gather serves.
  bool has_equal_sizes() const;

 private:
  std::vector<std::optional<Request>> requests_;
};

/// The reduction of the terms along the tree of the Communicator contract, over their indices; an undefined term is
/// absent and its sibling passes unchanged. One term at least is defined. Runs on the current stream.
at::Tensor reduce_along_tree(std::vector<at::Tensor> terms, ReduceOp op);

}  // namespace muster::comm::nccl
