// Gradients of a backward that the user's loop calls itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/communicator.h"
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
  /// Lets go of memory of the group.
  void release() noexcept;

 private:
  void check() const;
  void reduce(const std::vector<at::Tensor>& parameters, bool has_gradients);
  at::Tensor buffer(int64_t numel, at::ScalarType dtype);

  Session& session_;
  at::Tensor buffers_[2];  // of fp32 and of fp64, where the group reduces fastest; all models of the strategy use them
};

}  // namespace muster
