// Mixed precision: what a forward pass computes in. Usable without a strategy, with loss_scaler.h for fp16.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace muster {

/// What eligible operators of a forward pass compute in; parameters and optimizer states keep their dtypes.
enum class Precision { fp32, bf16, fp16 };

/// Scaling of the loss against underflow of fp16 gradients, as torch.amp.GradScaler. A value.
struct LossScale {
  double init = 65536.0;  ///< scale of the first step
  double growth = 2.0;    ///< factor after `interval` finite steps in a row
  double backoff = 0.5;   ///< factor after a step with a gradient that is not finite
  int interval = 2000;    ///< finite steps in a row after which the scale grows

  /// Throws InvalidArgument naming the field that is out of range.
  void validate() const;
};

/// While it lives, the calling thread's operators on `device` follow torch's autocast rules for `precision` (fp32: they
/// do not cast, even inside an outer Autocast). Threads do not inherit it. Nests; ends in reverse order. The outermost
/// end clears torch's cache of cast parameters: to update parameters inside one, call clear_cache afterwards, as steps
/// of a strategy and of LossScaler do.
class Autocast {
 public:
  /// Begins, for operators on `device`.
  explicit Autocast(Precision precision, c10::DeviceType device = c10::DeviceType::CPU);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// Forgets the casts of parameters on all threads.
  static void clear_cache();

 private:
  c10::DeviceType device_;
  bool was_enabled_;
  bool was_caching_;
  bool recasts_ = false;
  c10::ScalarType outer_dtype_;
};

}  // namespace muster
