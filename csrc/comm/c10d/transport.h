// The transport over a c10d::ProcessGroup.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/c10d/communicator.h"
#include "comm/transport.h"

namespace muster::comm {

class C10dTransport final : public Transport {
 public:
  /// `aborts_group`: abort() calls that of the group's backend, too.
  C10dTransport(ProcessGroupPtr group, c10::Device device, bool aborts_group = false);
  ~C10dTransport() override;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  c10::Device device() const noexcept override { return device_; }
  int worker_of(int rank) const noexcept override { return rank; }
  Work all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  Work broadcast(const at::Tensor& tensor, int source) override;
  Work gather(const std::vector<at::Tensor>& outputs, const at::Tensor& input) override;
  /// Rank r has sizes_in[r] elements of `input`, one rank's after the other's, and sizes_out[r] of `output` are from
  /// it.
  Work all_to_all(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& sizes_out,
                  const std::vector<int64_t>& sizes_in);
  void abort(const std::string& reason) noexcept override;

  /// Shared with the works under way.
  struct Abortion {
    std::atomic<bool> requested{false};
    std::mutex mutex;
    std::string reason;  // guarded by mutex
  };

 private:
  template <class F>
  Work issue(const char* what, const F& call);

  const pid_t process_;
  ProcessGroupPtr group_;
  const c10::Device device_;
  const bool aborts_group_;
  const int rank_;
  const int size_;
  const std::shared_ptr<Abortion> abortion_ = std::make_shared<Abortion>();
};

}  // namespace muster::comm
