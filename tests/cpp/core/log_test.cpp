#include "core/log.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/catch.h"

namespace muster {
namespace {

/// The default sink and no rank, before and after.
struct Restore {
  Restore() { reset(); }
  ~Restore() { reset(); }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  static void reset() {
    set_log_sink({});
    set_log_rank(-1, 0);
  }
};

class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

TEST_CASE("messages carry the rank", "[log]") {
  Restore restore;
  std::vector<std::pair<LogLevel, std::string>> seen;
  set_log_sink([&](LogLevel level, const std::string& message) { seen.emplace_back(level, message); });
  log(LogLevel::info, "a");
  set_log_rank(1, 4);
  log(LogLevel::error, "b");
  set_log_rank(-1, 0);
  log(LogLevel::debug, "c");
  REQUIRE(seen.size() == 3);
  CHECK((seen[0] == std::pair{LogLevel::info, std::string("a")}));
  CHECK((seen[1] == std::pair{LogLevel::error, std::string("[rank 1/4] b")}));
  CHECK((seen[2] == std::pair{LogLevel::debug, std::string("c")}));
}

TEST_CASE("without a sink, warnings and errors go to TORCH_WARN", "[log]") {
  Restore restore;
  Warnings warnings;
  c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (LogLevel level : {LogLevel::debug, LogLevel::info, LogLevel::warning, LogLevel::error}) log(level, "text");
  CHECK(warnings.messages == std::vector<std::string>{"text", "text"});
}

TEST_CASE("a sink may fail, log and replace itself", "[log]") {
  Restore restore;
  std::vector<std::string> seen;
  set_log_sink([](LogLevel, const std::string&) { throw std::runtime_error("full"); });
  CHECK_NOTHROW(log(LogLevel::error, "lost"));
  set_log_sink([&](LogLevel, const std::string& message) {
    set_log_sink([&](LogLevel, const std::string& inner) { seen.push_back("inner " + inner); });
    log(LogLevel::info, message);
  });
  log(LogLevel::info, "a");
  CHECK(seen == std::vector<std::string>{"inner a"});
}

TEST_CASE("threads log while the sink and the rank change", "[log]") {
  Restore restore;
  std::atomic<int> count{0};
  set_log_sink([&](LogLevel, const std::string&) { ++count; });
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 500; ++i) log(LogLevel::info, "x");
    });
  }
  for (int i = 0; i < 100; ++i) {
    set_log_rank(i, 100);
    set_log_sink([&](LogLevel, const std::string&) { ++count; });
  }
  for (auto& thread : threads) thread.join();
  CHECK(count == 1500);
}

}  // namespace
}  // namespace muster
