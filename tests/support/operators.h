// Counts the operators of torch that a thread calls.
#pragma once

#include <ATen/record_function.h>

#include <map>
#include <memory>
#include <set>
#include <string>

namespace muster::testing {

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
  int without_views() const {
    static const std::set<std::string> kViews = {"aten::detach", "aten::view",         "aten::narrow",
                                                 "aten::select", "aten::view_as_real", "aten::view_as_complex"};
    int count = 0;
    for (const auto& [name, number] : calls) count += kViews.contains(name) ? 0 : number;
    return count;
  }

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

}  // namespace muster::testing
