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
  /// `parameters` require gradients; they may be frozen later. `first` is called by the thread that brings a gradient,
  /// and must not throw.
  GradientArrivals(const std::vector<at::Tensor>& parameters, std::function<void()> first);
  ~GradientArrivals();
  GradientArrivals(const GradientArrivals&) = delete;
  GradientArrivals& operator=(const GradientArrivals&) = delete;

  /// Whether the next gradient that comes calls `first`, once.
  void announce(bool next) noexcept;
  /// Whether one has come since this was asked last.
  bool take() noexcept;

 private:
  struct Noted;
  struct Hook;

  const std::shared_ptr<Noted> noted_;  // hooks that still run may outlive this object
  std::vector<std::unique_ptr<Hook>> hooks_;
};

}  // namespace muster
