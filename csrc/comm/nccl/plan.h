// A group call of NCCL: what the ranks of one process call in it, and whether it fits together.
#pragma once

#include <cstddef>
#include <vector>

#include "comm/nccl/api.h"

namespace muster::comm::nccl {

enum class CallKind { all_reduce, reduce, reduce_scatter, broadcast, all_gather, send, receive };

/// One rank's call, with the arguments that NcclApi's function has.
struct Operation {
  CallKind kind;
  const void* source;
  void* destination;
  size_t count;
  DataType type;
  Reduction reduction;
  int peer;  ///< or root
  Stream stream;

  bool is_collective() const noexcept { return kind != CallKind::send && kind != CallKind::receive; }
};

/// Bytes from one rank to another.
struct Transfer {
  int receiver;
  void* destination;
  int sender;
  const void* source;
  size_t bytes;
};

struct Plan {
  std::vector<std::vector<Operation>> collectives;  ///< each by rank; of one kind, count, type, reduction and root
  std::vector<Transfer> transfers;
};

/// `operations[r]` are those of rank r, in order. Every rank takes part in each collective, and the n-th message from
/// one rank to another is what that one receives n-th from it. Throws CommError saying what does not fit.
Plan make_plan(const std::vector<std::vector<Operation>>& operations);

}  // namespace muster::comm::nccl
