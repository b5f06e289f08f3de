// Calls of what may never answer.
#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "core/make_thread.h"
#include "muster/error.h"

namespace muster {

/// What `call` gives in a thread of its own, or nothing where that takes longer than `patience`: the thread is left to
/// itself then, perhaps until the process has ended, so that `call` owns all that it uses. Throws what `call` throws,
/// and E where the system gives no thread; `purpose` is as of make_thread.
template <class E = CommError, class F>
std::optional<std::invoke_result_t<F&>> within(std::chrono::milliseconds patience, const std::string& purpose, F call) {
  std::promise<std::invoke_result_t<F&>> answer;
  auto given = answer.get_future();
  make_thread<E>(purpose, [answer = std::move(answer), call = std::move(call)]() mutable {
    try {
      answer.set_value(call());
    } catch (...) {
      answer.set_exception(std::current_exception());
    }
  }).detach();
  if (given.wait_for(patience) != std::future_status::ready) return std::nullopt;
  return given.get();
}

}  // namespace muster
