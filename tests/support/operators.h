// Counts the operators of torch that a thread, or all threads, call.
#pragma once

#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace muster::testing {

/// While one lives, the operators that the calling thread calls are counted, or, with kAllThreads, those of all
/// threads; those that an operator calls are not. One at a time, in a thread or altogether.
template <bool kAllThreads>
class CountedOperators {
 public:
  CountedOperators() {
    const std::lock_guard lock(mutex);
    calls().clear();
    const auto callback = at::RecordFunctionCallback(&enter, &leave).scopes({at::RecordScope::FUNCTION});
    handle_ = kAllThreads ? at::addGlobalCallback(callback) : at::addThreadLocalCallback(callback);
  }
  ~CountedOperators() { at::removeCallback(handle_); }
  CountedOperators(const CountedOperators&) = delete;
  CountedOperators& operator=(const CountedOperators&) = delete;

  /// So far, by name ("aten::cat").
  std::map<std::string, int> by_name() const {
    const std::lock_guard lock(mutex);
    return calls();
  }
  /// So far, without those that compute nothing, and those named.
  int without_views(const std::set<std::string>& others = {}) const {
    static const std::set<std::string> kViews = {"aten::detach", "aten::view",         "aten::narrow",
                                                 "aten::select", "aten::view_as_real", "aten::view_as_complex"};
    int count = 0;
    for (const auto& [name, number] : by_name()) count += kViews.contains(name) || others.contains(name) ? 0 : number;
    return count;
  }

 private:
  using Calls = std::map<std::string, int>;

  static Calls& calls() {
    static thread_local Calls own;
    static Calls all;
    return kAllThreads ? all : own;
  }
  struct Called final : at::ObserverContext {};

  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
    // What autograd's engine calls, hooks included, is counted by itself.
    if (std::string_view(function.name()).starts_with("autograd::engine::")) return nullptr;
    if (depth++ == 0) {
      const std::lock_guard lock(mutex);
      ++calls()[function.name()];
    }
    return std::make_unique<Called>();
  }
  static void leave(const at::RecordFunction&, at::ObserverContext* called) { depth -= called == nullptr ? 0 : 1; }

  static inline std::mutex mutex;
  static inline thread_local int depth = 0;
  at::CallbackHandle handle_{};
};

using OperatorCount = CountedOperators<false>;
using AllOperators = CountedOperators<true>;

}  // namespace muster::testing
