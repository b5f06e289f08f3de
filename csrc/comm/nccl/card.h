// What a rank of a group tells the others of the operation that it is about to issue.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/request.h"

namespace muster::comm::nccl {

/// Plain data without padding. What is behind the request is of scopes.
struct Card {
  Request request;
  int64_t number = 0;      ///< of the operation in its scope, from zero
  int64_t ends = 0;        ///< 1: the rank asks for nothing, and ends the scope after `number` operations
  uint64_t script = 0;     ///< digest of the script that the rank would follow; 0: of none
  int64_t num_issued = 0;  ///< of what is queued
  int64_t num_ready = 0;   ///< likewise; see QueuedOperations
};
static_assert(sizeof(Card) % sizeof(int64_t) == 0 && std::is_trivially_copyable_v<Card>);

/// A card as a tensor on the host, and back.
at::Tensor to_tensor(const Card& card);
Card card_in(const at::Tensor& tensor);

/// By rank; nothing from a rank that sits the scope out.
using Cards = std::vector<std::optional<Card>>;

/// Of what is queued: how many each present rank has issued or could; how many one has issued.
int64_t least_ready(const Cards& cards);
int64_t most_issued(const Cards& cards);

/// What two of the ranks disagree about, or an empty string. All find the same.
std::string find_mismatch(const Cards& cards);

}  // namespace muster::comm::nccl
