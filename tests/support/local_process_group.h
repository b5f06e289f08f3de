// A c10d::ProcessGroup whose ranks are threads: it stands in for a user's process group, which C++ cannot construct
// from the wheel.
#pragma once

#include <memory>
#include <vector>

#include "comm/c10d/communicator.h"
#include "comm/hosts/communicator.h"
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

/// Where the workers of a job of several hosts are.
struct OverHostsPlan {
  std::vector<int> host_of_worker;
  std::vector<int> replicas_of_worker;  ///< empty: the ranks divided
  bool has_one_group = false;           ///< between hosts, rather than two
  bool uses_tcp = false;                ///< between hosts, on the loopback
  std::shared_ptr<comm::LostWorkers> lost = {};
};

/// Ranks over such hosts: threads that meet in memory within a host, and in such groups, or over TCP, between hosts.
std::string run_over_hosts(OverHostsPlan plan, int size, const Body& body, comm::Milliseconds timeout = Seconds(60),
                           bool check = false);

/// Two hosts, of which the first has two workers that are not neighbours where there are more than two ranks.
struct OverHosts {
  static constexpr const char* kName = "over hosts";
  static std::string run(int size, const Body& body, comm::Milliseconds timeout = Seconds(60));
};

}  // namespace muster::testing
