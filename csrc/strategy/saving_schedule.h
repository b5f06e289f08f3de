// After which steps a training loop saves.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace muster {

/// A checkpoint is due once the count of steps passes a multiple of `every`, or `seconds` have passed since the last
/// one, whichever comes first; never where neither is given. All workers count the same steps, and the chief's clock
/// decides for all of them.
///
/// The workers do not ask the clock after each step: the chief says after how many steps to ask it again, after half of
/// the time that is left, as long as the steps were lately. So they meet a few times for each halving. Owned by the
/// thread that steps.
class SavingSchedule {
 public:
  struct Options {
    std::optional<int64_t> every = {};    ///< steps, at least 1
    std::optional<double> seconds = {};   ///< above 0
    std::function<double()> now = clock;  ///< seconds of a clock that runs steadily
    /// The chief's number; collective over the workers that save together. Empty where no other saves with this one.
    std::function<int64_t(int64_t)> number_of_chief = {};
  };

  /// Throws InvalidArgument for options that are out of bounds.
  explicit SavingSchedule(Options options);

  /// After each step that was counted, `steps` so far in the job. Collective where it asks the clock.
  void note_step(int64_t steps);
  bool is_due() const noexcept { return is_due_; }
  /// A checkpoint was made, or loaded.
  void start_over();

 private:
  static double clock();
  bool is_over();

  const Options options_;
  std::optional<int64_t> steps_seen_;
  bool is_due_ = false;
  double began_ = 0;
  double asked_ = 0;
  int64_t since_asked_ = 0;  // steps
  int64_t ask_at_ = 1;
  int64_t longest_ = 1;  // steps between two questions so far
};

}  // namespace muster
