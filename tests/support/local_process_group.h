// A c10d::ProcessGroup whose ranks are threads: it stands in for a user's process group, which C++ cannot construct
// from the wheel.
#pragma once

#include "comm/c10d/communicator.h"
#include "support/run_ranks.h"

namespace muster::testing {

/// The process group of the rank that `communicator` is.
comm::ProcessGroupPtr make_process_group(comm::CommunicatorPtr communicator);

/// The adapter with request exchange, over such a group.
struct C10d {
  static constexpr const char* kName = "c10d";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};

/// Two workers over such a group, which share the ranks as replicas.
struct Hierarchical {
  static constexpr const char* kName = "hierarchical";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};

}  // namespace muster::testing
