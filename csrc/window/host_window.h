// The end of windows whose replicas work on the host and reduce among themselves.
#pragma once

#include <functional>
#include <vector>

#include "window/divided_update.h"
#include "window/host_buffers.h"
#include "window/host_numbers.h"
#include "window/window.h"
#include "window/window_context.h"

namespace muster {

/// What this replica's averaged buffers weigh in the tail where `replicas` agree on them.
double buffer_share(const comm::Communicator& replicas, const WindowContext& context, size_t local_replica,
                    const HostNumbers& numbers);

/// Collective over `replicas`: sums the tail, with averaged buffers times `share`, and tells failures or metrics and
/// integer buffers. Waits for the engine's buckets.
ClosedWindow close_on_host(comm::Communicator& replicas, const WindowContext& context, size_t local_replica,
                           const Closing& closing, double share, HostNumbers& numbers, HostBuffers& buffers);

/// Merges buffers as the tail says; see HostBuffers::merge.
void merge_host_buffers(const WindowContext& context, const Tail& tail, bool adopts, HostBuffers& buffers);

class HostWindow : public Window {
 public:
  /// `divided`: null unless replicas divide steps.
  HostWindow(const WindowContext& context, DividedUpdate* divided);

  void open() override;
  void weigh(int local_replica, double rows) override;
  NotedPart note(const ReplicaPart& part) override { return numbers_.note(part); }
  ClosedWindow close(int local_replica, const Closing& closing) override;
  void finish(const Tail& tail, bool fused, WindowSums& sums) override;
  kernels::StepScalars* leave_means(const Tail& tail, const std::function<void()>& edit) override;
  void update(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups,
              const OnReplicas& on_replicas) override;
  WindowSums so_far() const override { return numbers_.so_far(); }
  WindowScale& loss_scale() override { return numbers_.scale(); }

 private:
  bool makes_means_first(const Tail& tail) const;

  WindowContext context_;
  DividedUpdate* divided_;
  HostNumbers numbers_;
  HostBuffers buffers_;
};

}  // namespace muster
