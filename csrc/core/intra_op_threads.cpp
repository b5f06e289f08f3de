#include "core/intra_op_threads.h"

#include <ATen/Parallel.h>
#include <pthread.h>

#include <mutex>
#include <thread>
#include <tuple>

namespace muster {

namespace {
std::mutex setting_mutex;

std::lock_guard<std::mutex> lock_setting() {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto unlock = [] { setting_mutex.unlock(); };
    ::pthread_atfork([] { setting_mutex.lock(); }, unlock, unlock);
  });
  return std::lock_guard(setting_mutex);
}

// A thread's first call sets the process's number there.
int get_intra_op_threads() {
  const auto lock = lock_setting();
  return at::get_num_threads();
}

}  // namespace

void set_intra_op_threads(int threads) {
  const auto lock = lock_setting();
  at::set_num_threads(threads);
}

void set_intra_op_threads_here(int threads, int elsewhere) {
  std::ignore = get_intra_op_threads();  // else the first use of torch would undo it
  set_intra_op_threads(threads);
  if (threads != elsewhere) std::thread(set_intra_op_threads, elsewhere).join();
}

IntraOpThreads::IntraOpThreads(int threads) : previous_(get_intra_op_threads()) {
  if (previous_ != threads) set_intra_op_threads(threads);
}

IntraOpThreads::~IntraOpThreads() {
  if (get_intra_op_threads() != previous_) set_intra_op_threads(previous_);
}

}  // namespace muster
