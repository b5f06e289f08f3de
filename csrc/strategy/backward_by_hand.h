// Gradients of a backward that the user's loop calls itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "comm/communicator.h"
#include "gradient/gradient_memory.h"
#include "gradient/peer_average.h"
#include "strategy/session.h"

namespace muster {

/// Averages gradients over workers. Externally synchronised.
class GradientAverage {
 public:
  explicit GradientAverage(Session& session) : session_(session) {}
  GradientAverage(const GradientAverage&) = delete;
  GradientAverage& operator=(const GradientAverage&) = delete;

  /// Collective over workers (one replica a worker): replaces `.grad` of each parameter, dense or complex, by its mean
  /// over workers; one that is undefined everywhere stays so. All workers give parameters of the same dtypes and sizes
  /// in the same order. Sums add in fp32, of fp64 in fp64. Throws InvalidArgument on parameter servers, with a loss
  /// scale, and for several replicas in a process; CommError.
  void average(const std::vector<at::Tensor>& parameters);
  /// The part in average() of a worker that has no gradients: zeros, and whatever it has stays as it is.
  void add_nothing(const std::vector<at::Tensor>& parameters);
  /// Those of a prepared module that are trainable.
  void average_module(int module);
  /// Local: memory for the gradients of `parameters`, of which large ones that come there are averaged where they are.
  /// Null where that is not possible.
  std::shared_ptr<GradientMemory> memory_for(const std::vector<at::Tensor>& parameters);
  /// Lets go of memory of the group.
  void release() noexcept;

 private:
  /// Where the mean of a parameter's gradient is.
  struct Slot {
    size_t parameter;
    at::Tensor mean;
  };

  void check() const;
  void reduce(const std::vector<at::Tensor>& parameters, bool has_gradients);
  std::vector<size_t> large_ones(const std::vector<at::Tensor>& parameters);
  std::vector<Slot> average_large(const std::vector<at::Tensor>& parameters, const std::vector<size_t>& large,
                                  bool has_gradients);
  at::Tensor buffer(int64_t numel, at::ScalarType dtype);
  at::Tensor slot(size_t number, int64_t numel, at::ScalarType dtype);

  Session& session_;
  at::Tensor buffers_[2];  // of fp32 and of fp64, where the group reduces fastest; all models of the strategy use them
  std::optional<PeerAverage> peers_;
  std::vector<at::Tensor> slots_;  // for large gradients that are where peers do not reach them
  std::vector<std::weak_ptr<GradientMemory>> memories_;
};

}  // namespace muster
