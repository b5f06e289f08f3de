#include "core/intra_op_threads.h"

#include <ATen/Parallel.h>
#include <pthread.h>

#include <mutex>
#include <thread>
#include <tuple>

namespace muster {

namespace {
std::mutex setting_mutex;
}  // namespace

void set_intra_op_threads(int threads) {
  static std::once_flag once;
  std::call_once(once, [] {
    const auto unlock = [] { setting_mutex.unlock(); };
    ::pthread_atfork([] { setting_mutex.lock(); }, unlock, unlock);
  });
  const std::lock_guard lock(setting_mutex);
  at::set_num_threads(threads);
}

void set_intra_op_threads_here(int threads, int elsewhere) {
  std::ignore = at::get_num_threads();  // the first use of torch takes the process's number, and would undo it
  set_intra_op_threads(threads);
  if (threads != elsewhere) std::thread(set_intra_op_threads, elsewhere).join();
}

IntraOpThreads::IntraOpThreads(int threads) : previous_(at::get_num_threads()) {
  if (previous_ != threads) set_intra_op_threads(threads);
}

IntraOpThreads::~IntraOpThreads() {
  if (at::get_num_threads() != previous_) set_intra_op_threads(previous_);
}

}  // namespace muster
