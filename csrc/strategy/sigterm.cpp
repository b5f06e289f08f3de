#include "strategy/sigterm.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

namespace muster {

namespace {

// A signal handler reads and writes these.
std::atomic<bool> is_received{false};
std::atomic<bool> is_looked_at{false};
std::atomic<bool> is_ignored{false};
std::atomic<bool> can_be_looked_at{true};
std::atomic<pid_t> process{0};  // that watches
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free);

std::mutex watches_mutex;
int num_watches = 0;  // guarded by watches_mutex

template <size_t Size>
void say(const char (&line)[Size]) noexcept {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line, Size - 1);
}

void set_default_action() noexcept {
  struct sigaction action{};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGTERM, &action, nullptr);
}

void end_process() noexcept {
  if (can_be_looked_at.load(std::memory_order_relaxed)) {
    say("muster: SIGTERM ends this process: the program never looks at strategy.stopping, so it would train on\n");
  }
  set_default_action();
  ::raise(SIGTERM);
}

extern "C" void on_sigterm(int) {
  const int errno_of_interrupted = errno;
  if (::getpid() != process.load(std::memory_order_relaxed)) {  // a child, before in_child
    set_default_action();
    ::raise(SIGTERM);
    return;
  }
  if (is_ignored.load(std::memory_order_relaxed)) return end_process();
  is_received.store(true, std::memory_order_relaxed);
  say("muster: SIGTERM: strategy.stopping turns True at the end of the window; another one ends this process\n");
  set_default_action();
  errno = errno_of_interrupted;
}

bool has_action(void (*handler)(int)) noexcept {
  struct sigaction current{};
  return ::sigaction(SIGTERM, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) == 0 &&
         current.sa_handler == handler;
}

void forget_watches() noexcept {
  if (has_action(on_sigterm)) set_default_action();
  is_looked_at.store(false);
  is_ignored.store(false);
}

void before_fork() { watches_mutex.lock(); }
void in_parent() { watches_mutex.unlock(); }
void in_child() {
  num_watches = 0;
  forget_watches();
  is_received.store(false);
  watches_mutex.unlock();
}

}  // namespace

SigtermWatch::SigtermWatch() : process_(getpid()) {
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(before_fork, in_parent, in_child); });
  const std::lock_guard lock(watches_mutex);
  process.store(process_, std::memory_order_relaxed);
  if (num_watches++ > 0 || is_received.load() || !has_action(SIG_DFL)) return;
  struct sigaction action{};
  action.sa_handler = on_sigterm;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
}

SigtermWatch::~SigtermWatch() { end(); }

void SigtermWatch::end() noexcept {
  if (!lives_ || getpid() != process_) return;
  lives_ = false;
  const std::lock_guard lock(watches_mutex);
  if (--num_watches == 0) forget_watches();
}

bool SigtermWatch::received() noexcept { return is_received.load(std::memory_order_relaxed); }

void SigtermWatch::note_look() noexcept {
  if (is_looked_at.load(std::memory_order_relaxed)) return;
  is_looked_at.store(true, std::memory_order_relaxed);
  is_ignored.store(false, std::memory_order_relaxed);
}

void SigtermWatch::note_step() noexcept {
  if (is_looked_at.load(std::memory_order_relaxed)) return;
  is_ignored.store(true, std::memory_order_relaxed);
  if (received()) end_process();
}

void SigtermWatch::let_end() noexcept {
  can_be_looked_at.store(false, std::memory_order_relaxed);
  note_step();
}

}  // namespace muster
