// Counts the operators of torch that a thread, or all threads, call.
#pragma once

#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace muster::testing {

/// The calls of operators that compute something: neither views nor allocations.
inline int count_without_views(const std::map<std::string, int>& calls) {
  static const std::set<std::string> kViews = {
      "aten::detach",     "aten::view",  "aten::narrow",       "aten::select",          "aten::slice",
      "aten::t",          "aten::alias", "aten::view_as_real", "aten::view_as_complex", "aten::empty",
      "aten::empty_like", "detach",      "aten::as_strided"};
  int count = 0;
  for (const auto& [name, number] : calls) count += kViews.contains(name) ? 0 : number;
  return count;
}

/// While one lives, the operators that the calling thread calls are counted; those that an operator calls are not. One
/// at a time in a thread.
class OperatorCount {
 public:
  OperatorCount() {
    depth = 0;
    calls.clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&OperatorCount::enter, &OperatorCount::leave).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorCount() { at::removeCallback(handle_); }
  OperatorCount(const OperatorCount&) = delete;
  OperatorCount& operator=(const OperatorCount&) = delete;

  /// So far, by name ("aten::cat").
  const std::map<std::string, int>& by_name() const { return calls; }
  /// So far, without those that compute nothing.
  int without_views() const { return count_without_views(calls); }

 private:
  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
    if (depth++ == 0) ++calls[function.name()];
    return nullptr;
  }
  static void leave(const at::RecordFunction&, at::ObserverContext*) { --depth; }

  static inline thread_local int depth = 0;
  static inline thread_local std::map<std::string, int> calls;
  at::CallbackHandle handle_{};
};

/// The same for the operators of all threads. One at a time.
class AllOperators {
 public:
  AllOperators() {
    calls.clear();
    handle_ = at::addGlobalCallback(
        at::RecordFunctionCallback(&AllOperators::enter, &AllOperators::leave).scopes({at::RecordScope::FUNCTION}));
  }
  ~AllOperators() { at::removeCallback(handle_); }
  AllOperators(const AllOperators&) = delete;
  AllOperators& operator=(const AllOperators&) = delete;

  std::map<std::string, int> by_name() const {
    const std::lock_guard lock(mutex);
    return calls;
  }
  int without_views() const { return count_without_views(by_name()); }

 private:
  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
    if (depth++ > 0) return nullptr;
    const std::lock_guard lock(mutex);
    ++calls[function.name()];
    return nullptr;
  }
  static void leave(const at::RecordFunction&, at::ObserverContext*) { --depth; }

  static inline thread_local int depth = 0;
  static inline std::mutex mutex;
  static inline std::map<std::string, int> calls;  // guarded by mutex
  at::CallbackHandle handle_{};
};

}  // namespace muster::testing
