// Rank-aware logging. Python routes it to logging.getLogger("muster"); in C++ it goes to TORCH_WARN / stderr.
#pragma once

#include <functional>
#include <string>

namespace muster {

enum class LogLevel { debug, info, warning, error };

/// Receives every message. Called from any thread, without locks held.
using LogSink = std::function<void(LogLevel, const std::string& message)>;

/// Replaces where messages go; an empty sink restores the default (warnings and errors through TORCH_WARN, the rest
/// dropped). Thread-safe.
void set_log_sink(LogSink sink);

/// Sets the rank that prefixes messages; -1 for none. Thread-safe.
void set_log_rank(int rank, int num_workers);

/// Sends "[rank r/n] message" to the sink. Never throws: where the sink does, the message goes to stderr. Thread-safe.
void log(LogLevel level, const std::string& message) noexcept;

}  // namespace muster
