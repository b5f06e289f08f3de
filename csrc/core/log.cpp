#include "core/log.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>

namespace muster {
namespace {

struct LogState {
  std::mutex mutex;
  std::shared_ptr<const LogSink> sink;  // guarded by mutex
  std::string prefix;                   // guarded by mutex
};

LogState& state() {
  // Never destroyed: threads may log while the process exits.
  static auto* state = new LogState;
  return *state;
}

void default_sink(LogLevel level, const std::string& message) {
  if (level == LogLevel::warning || level == LogLevel::error) {
    TORCH_WARN(message);
  }
}

}  // namespace

void set_log_sink(LogSink sink) {
  auto shared = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  LogState& log_state = state();
  {
    std::lock_guard lock(log_state.mutex);
    log_state.sink.swap(shared);
  }
}

void set_log_rank(int rank, int num_workers) {
  std::string prefix;
  if (rank >= 0) prefix = "[rank " + std::to_string(rank) + "/" + std::to_string(num_workers) + "] ";
  LogState& log_state = state();
  std::lock_guard lock(log_state.mutex);
  log_state.prefix = std::move(prefix);
}

void log(LogLevel level, const std::string& message) noexcept {
  try {
    std::shared_ptr<const LogSink> sink;
    std::string text;
    {
      LogState& log_state = state();
      std::lock_guard lock(log_state.mutex);
      sink = log_state.sink;
      text = log_state.prefix + message;
    }
    if (sink) {
      (*sink)(level, text);
    } else {
      default_sink(level, text);
    }
  } catch (...) {  // a sink that fails must not fail what it reports on
    std::fprintf(stderr, "muster: this message could not be logged: %s\n", message.c_str());
  }
}

}  // namespace muster
