// The end of windows whose parameters live on servers, which step them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "window/host_buffers.h"
#include "window/host_numbers.h"
#include "window/joining.h"
#include "window/server_exchange.h"
#include "window/window.h"
#include "window/window_context.h"

namespace muster {

/// What a worker's replicas have they add among themselves first; its first replica then speaks to the servers for all.
/// Where workers step together they agree on the tail through the servers, over the workers that are there; where each
/// steps on its own, a window is this worker's alone. Windows are fused.
class ServerWindow : public Window {
 public:
  ServerWindow(const WindowContext& context, const ServerJob& job);

  /// Null before connect().
  ServerExchange* exchange() noexcept { return exchange_.get(); }
  Joining& joining() noexcept { return joining_; }

  /// Connects, for `optimizer`, whose parameter i has registry index `parameters[i]`: from here on servers step. See
  /// ServerExchange. After GradientSums::build. Throws InvalidArgument if the optimizer lacks a parameter to train.
  void connect(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups);

  /// Replica 0's thread, or autograd's in its backward. ServerExchange::take.
  void take(size_t parameter, const at::Tensor& sums);

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
  using Records = std::vector<std::pair<uint32_t, std::string>>;

  template <class F>
  void speak(const F& call);
  double share_of(size_t local_replica) const;
  void push_rows(bool has_failed);
  void agree(ClosedWindow& closed);
  /// Returns all failures, by replica of the job.
  std::vector<std::string> hear(const Tail& tail, at::Tensor integers, const Records& records);
  void check_dense(const Tail& tail);
  bool is_used(const Tail& tail, size_t parameter) const;

  WindowContext context_;
  const ServerJob& job_;
  HostNumbers numbers_;
  HostBuffers buffers_;
  Joining joining_;
  bool adopts_ = false;  // the window gives this worker the others' buffers, whoever wrote them
  std::unique_ptr<ServerExchange> exchange_;
};

}  // namespace muster
