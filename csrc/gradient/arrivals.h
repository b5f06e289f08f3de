// Whether gradients come to parameters, for whoever has to do something once they have.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace muster {

/// Watches parameters while it lives. Autograd's threads note what comes; everything else is externally synchronised.
class GradientArrivals {
 public:
  /// `parameters` that are frozen are watched from a renew() on at which they are not. `first` is called by the thread
  /// that brings a gradient; what it throws ends that backward.
  GradientArrivals(std::vector<at::Tensor> parameters, std::function<void()> first);
  ~GradientArrivals();
  GradientArrivals(const GradientArrivals&) = delete;
  GradientArrivals& operator=(const GradientArrivals&) = delete;

  /// Watches parameters that were given another dtype or device, too: autograd has forgotten what it knew of them. So
  /// for those that were frozen.
  void renew();
  /// Whether the next gradient that comes calls `first`, once.
  void announce(bool next) noexcept;
  /// Whether one has come since this was asked last.
  bool take() noexcept;

 private:
  struct Noted;
  struct Watched;

  const std::shared_ptr<Noted> noted_;
  std::vector<Watched> watched_;
};

}  // namespace muster
