// Runs CUDA kernels on the host; csrc/kernels/cuda/device.h includes this where nvcc does not compile. A block is an OS
// thread and its threads are fibers, so __shared__ is thread_local. Blocks of a plain launch run one after another, in
// an order by seed; those of a cooperative launch run at the same time. Fibers switch at barriers, shuffles and
// spin_pause() only, by the worst schedule: one warp as far as it can go, then the next; a seed shuffles warps and
// lanes and makes blocks late. A launch fails, with a text, when a thread returns while others wait, when threads wait
// at different barriers, when nothing moves within the limit, and at a misaligned vector access.
// The address sanitizer sees the fibers' stacks, the thread sanitizer the kernel's own ordering: emulated barriers
// synchronise just those who meet there, and the emulator's own state is hidden from it.
#pragma once

#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

#ifdef MUSTER_MUTANTS
#include "support/cuda_mutations.h"
#endif

#define __restrict__ __restrict
#define __launch_bounds__(...)
#define MUSTER_KERNEL static
#define MUSTER_DEVICE static inline
#define MUSTER_MEMBER inline
#define MUSTER_SHARED static thread_local
#define MUSTER_GRID_CONSTANT(...) const __VA_ARGS__&
#define MUSTER_UNROLL

namespace muster::kernels::cuda::emulation {

struct Options {
  uint32_t seed = 0;             ///< of the schedule; 0: in order
  double limit_s = 20;           ///< how long a block may spin without anything moving
  unsigned multiprocessors = 2;  ///< of the device that is played
  unsigned resident = 3;         ///< blocks of any kernel on each of them
  int capability = 90;           ///< of the device
  bool has_code = true;          ///< whether the build that is played has kernels for it
  bool is_captured = false;      ///< as if a graph were captured; what is launched runs at once all the same
};
inline Options options;

/// Of the calling thread's last launch.
inline thread_local size_t parameter_bytes = 0;
/// That the calling thread has launched.
inline thread_local int launches = 0;
/// That all threads have.
inline std::atomic<int> all_launches = 0;

struct Index {
  unsigned x = 0;
};

// --- what the sanitizers are told ------------------------------------------------------------------------------------

/// While one lives, the thread sanitizer overlooks what this fiber reads and writes. They are counted: it wants all
/// ended before a fiber is.
struct Hidden {
#if defined(__SANITIZE_THREAD__)
  static inline thread_local unsigned home_count = 0;
  static inline thread_local unsigned* count = nullptr;  ///< of the running fiber; null: home_count

  static void begin() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
  static void end() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
  static unsigned& current() { return count == nullptr ? home_count : *count; }

  Hidden() { begin(), ++current(); }
  ~Hidden() { --current(), end(); }
#else
  Hidden() {}
#endif
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
};

inline void sync_release([[maybe_unused]] void* gate) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(gate);
#endif
}

inline void sync_acquire([[maybe_unused]] void* gate) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(gate);
#endif
}

// --- fibers --------------------------------------------------------------------------------------------------------

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr unsigned kWarp = 32;

enum class Waiting : uint8_t { nowhere, warp, block, spinning, failed };

/// One CUDA thread. It outlives launches: making one is what costs time.
struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack;
  Index index;
  bool is_done = true;
  Waiting waiting = Waiting::nowhere;
  const char* site = nullptr;
  uint32_t shuffles = 0;
  uint32_t warp_syncs = 0, block_syncs = 0;
  uint64_t exchanged[2] = {};  ///< alternately: who shuffles again has passed the barrier that follows the last read
  void* fake_stack = nullptr;
  void* tsan = nullptr;
  unsigned hidden = 0;

  /// What it did happens before an acquiring of `gate`.
  void discard([[maybe_unused]] void* gate) {
    const Hidden own;
#if defined(__SANITIZE_THREAD__)
    if (tsan != nullptr) {
      void* home = __tsan_get_current_fiber();
      const unsigned count = hidden;
      __tsan_switch_to_fiber(tsan, __tsan_switch_to_fiber_no_sync);
      __tsan_release(gate);
      for (unsigned i = 0; i < count; ++i) Hidden::end();
      __tsan_switch_to_fiber(home, __tsan_switch_to_fiber_no_sync);
      __tsan_destroy_fiber(tsan);
    }
    hidden = 0;
#endif
#if defined(__SANITIZE_ADDRESS__)
    if (stack) __asan_unpoison_memory_region(stack.get(), kStackBytes);
#endif
    tsan = nullptr;
    fake_stack = nullptr;
    stack.reset();
  }
};

/// One launch; its blocks may run in several OS threads.
struct Launch {
  unsigned blocks;
  unsigned threads;
  const std::function<void()>& body;
  Options options;
  std::atomic<bool> has_failed{false};
  char problem[256] = {};
  std::mutex mutex{};  ///< guards problem
};

/// The block that an OS thread runs.
struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  ucontext_t home{};
  unsigned current = 0;
  unsigned count = 0;
  Index index, size, grid;
  Launch* launch = nullptr;
  std::mt19937 random;
  const void* home_stack = nullptr;
  size_t home_stack_bytes = 0;
  void* home_fake_stack = nullptr;
  void* home_tsan = nullptr;
  char start_gate = 0, end_gate = 0;
  char block_gates[2] = {};
  std::vector<char> warp_gates;

  ~Block() {
    for (auto& fiber : fibers) fiber->discard(&end_gate);
  }
};
inline thread_local Block this_block;

inline Fiber& this_fiber() { return *this_block.fibers[this_block.current]; }

inline void fail(const char* what, const char* where = "", const char* other = "") {
  Launch& launch = *this_block.launch;
  const std::lock_guard<std::mutex> lock(launch.mutex);
  if (launch.has_failed) return;
  snprintf(launch.problem, sizeof(launch.problem), "emulation: %s %s %s (block %u, thread %u)", what, where, other,
           this_block.index.x, this_block.current);
  launch.has_failed = true;
}

inline void enter(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&this_block.home_fake_stack, fiber.stack.get(), kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
  Hidden::count = &fiber.hidden;
  __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&this_block.home, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(this_block.home_fake_stack, nullptr, nullptr);
#endif
}

inline void leave(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fiber.fake_stack, this_block.home_stack, this_block.home_stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  Hidden::count = nullptr;
  __tsan_switch_to_fiber(this_block.home_tsan, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&fiber.context, &this_block.home);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &this_block.home_stack, &this_block.home_stack_bytes);
#endif
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &this_block.home_stack, &this_block.home_stack_bytes);
#endif
  for (;;) {
    const std::function<void()>* body = nullptr;
    {
      const Hidden hidden;
      body = &this_block.launch->body;
    }
    sync_acquire(&this_block.start_gate);
    (*body)();
    sync_release(&this_block.end_gate);
    const Hidden hidden;
    Fiber& fiber = this_fiber();
    fiber.is_done = true;
    leave(fiber);
  }
}

inline void prepare(Fiber& fiber, unsigned index) {
  fiber.index.x = index;
  fiber.is_done = false;
  fiber.waiting = Waiting::nowhere;
  fiber.shuffles = fiber.warp_syncs = fiber.block_syncs = 0;
  if (fiber.stack) return;
  fiber.stack.reset(new char[kStackBytes]);
#if defined(__SANITIZE_THREAD__)
  fiber.tsan = __tsan_create_fiber(0);
#endif
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

// --- where fibers wait -----------------------------------------------------------------------------------------------

inline void wait(Waiting kind, const char* site) {
  Fiber& fiber = this_fiber();
  fiber.waiting = kind;
  fiber.site = site;
  leave(fiber);
}

inline void sync_block(const char* site) {
  const Hidden hidden;
  void* gate = &this_block.block_gates[this_fiber().block_syncs++ % 2];
  sync_release(gate);
  wait(Waiting::block, site);
  sync_acquire(gate);
}

inline void sync_warp(const char* site) {
  const Hidden hidden;
  Fiber& fiber = this_fiber();
  void* gate = &this_block.warp_gates[2 * (fiber.index.x / kWarp) + fiber.warp_syncs++ % 2];
  sync_release(gate);
  wait(Waiting::warp, site);
  sync_acquire(gate);
}

/// What `source` holds; the own value where there is no such lane.
template <class T>
T shuffle(uint32_t mask, T value, unsigned source_lane, const char* site) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  const Hidden hidden;
  if (mask != 0xffffffffu) fail("a shuffle of part of a warp at", site);
  Fiber& fiber = this_fiber();
  const uint32_t side = fiber.shuffles++ % 2;
  memcpy(&fiber.exchanged[side], &value, sizeof(T));
  sync_warp(site);
  const unsigned source = fiber.index.x / kWarp * kWarp + source_lane;
  if (source_lane >= kWarp || source >= this_block.count) return value;
  T result;
  memcpy(&result, &this_block.fibers[source]->exchanged[side], sizeof(T));
  return result;
}

inline unsigned this_lane() {
  const Hidden hidden;
  return this_fiber().index.x % kWarp;
}

inline Index read(const Index& index) {
  const Hidden hidden;
  return index;
}

// --- the schedule of one block ---------------------------------------------------------------------------------------

inline bool is_runnable(const Fiber& fiber) {
  return !fiber.is_done && (fiber.waiting == Waiting::nowhere || fiber.waiting == Waiting::spinning);
}

/// Lets fibers [first, last) go on if all wait at one barrier of this kind. Fails the launch where they never could.
inline bool release(unsigned first, unsigned last, Waiting kind) {
  unsigned arrived = 0, done = 0;
  const char* site = nullptr;
  const char* other = nullptr;
  for (unsigned i = first; i < last; ++i) {
    const Fiber& fiber = *this_block.fibers[i];
    done += fiber.is_done ? 1 : 0;
    if (fiber.is_done || fiber.waiting != kind) continue;
    ++arrived;
    if (site == nullptr) site = fiber.site;
    if (strcmp(site, fiber.site) != 0) other = fiber.site;
  }
  if (arrived == 0 || arrived + done != last - first) return false;
  if (done > 0) {
    fail("a thread returned while others wait at", site);
  } else if (other != nullptr) {
    fail("threads wait at different barriers,", site, other);
  }
  if (this_block.launch->has_failed) return false;
  for (unsigned i = first; i < last; ++i) this_block.fibers[i]->waiting = Waiting::nowhere;
  return true;
}

struct Pass {
  unsigned left;
  bool has_moved = false;
};

inline void run_warp(unsigned first, unsigned last, std::vector<unsigned>& order, Pass& pass) {
  Block& block = this_block;
  if (block.launch->options.seed != 0) std::shuffle(order.begin() + first, order.begin() + last, block.random);
  do {
    for (unsigned j = first; j < last; ++j) {
      Fiber& fiber = *block.fibers[order[j]];
      if (!is_runnable(fiber)) continue;
      fiber.waiting = Waiting::nowhere;
      block.current = order[j];
      enter(fiber);
      if (fiber.is_done) --pass.left;
      if (fiber.is_done || fiber.waiting != Waiting::spinning) pass.has_moved = true;
      if (block.launch->has_failed) return;
    }
  } while (release(first, last, Waiting::warp));
}

/// A spinning block gives way; under a seed any block is late now and then.
inline void lag(bool is_spinning) {
  if (is_spinning) sched_yield();
  if (this_block.launch->options.seed != 0 && this_block.launch->blocks > 1 && this_block.random() % 16 == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(this_block.random() % 200));
  }
}

inline void run_fibers(bool is_concurrent) {
  using Clock = std::chrono::steady_clock;
  Block& block = this_block;
  std::vector<unsigned> order(block.count), warps((block.count + kWarp - 1) / kWarp);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  for (unsigned i = 0; i < warps.size(); ++i) warps[i] = i;
  Pass pass{block.count};
  Clock::time_point last_moved = Clock::now();
  while (pass.left > 0 && !block.launch->has_failed) {
    pass.has_moved = false;
    if (block.launch->options.seed != 0) std::shuffle(warps.begin(), warps.end(), block.random);
    for (const unsigned warp : warps) {
      run_warp(warp * kWarp, std::min((warp + 1) * kWarp, block.count), order, pass);
      if (block.launch->has_failed) return;
    }
    if (pass.left > 0 && release(0, block.count, Waiting::block)) pass.has_moved = true;
    if (pass.has_moved) {
      last_moved = Clock::now();
    } else if (std::none_of(block.fibers.begin(), block.fibers.begin() + block.count,
                            [](const auto& fiber) { return is_runnable(*fiber); })) {
      fail("threads wait at different barriers or for one that returned");
    } else if (std::chrono::duration<double>(Clock::now() - last_moved).count() > block.launch->options.limit_s) {
      fail("no progress within the limit");
    }
    if (is_concurrent) lag(!pass.has_moved);
  }
}

inline void run_block(Launch& launch, unsigned index, bool is_concurrent) {
  const Hidden hidden;
  Block& block = this_block;
  block.launch = &launch;
  block.count = launch.threads;
  block.index.x = index;
  block.size.x = launch.threads;
  block.grid.x = launch.blocks;
  block.random.seed(launch.options.seed * 1000003u + index);
  block.warp_gates.assign(2 * ((launch.threads + kWarp - 1) / kWarp), 0);
#if defined(__SANITIZE_THREAD__)
  block.home_tsan = __tsan_get_current_fiber();
#endif
  while (block.fibers.size() < block.count) block.fibers.push_back(std::make_unique<Fiber>());
  for (unsigned i = 0; i < block.count; ++i) prepare(*block.fibers[i], i);
  sync_release(&block.start_gate);
  run_fibers(is_concurrent);
  for (unsigned i = 0; i < block.count; ++i) {
    if (!block.fibers[i]->is_done) block.fibers[i]->discard(&block.end_gate);
  }
  sync_acquire(&block.end_gate);
}

// --- grids -----------------------------------------------------------------------------------------------------------

/// OS threads that keep their fibers from launch to launch. Thread-safe.
class Pool {
 public:
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_closing_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  /// Calls job(0) ... job(count - 1) at the same time, each in a thread of its own, and waits for all.
  void run(unsigned count, const std::function<void(unsigned)>& job) {
    unsigned left = count;
    std::unique_lock<std::mutex> lock(mutex_);
    for (unsigned i = 0; i < count; ++i) tasks_.push_back({&job, i, &left});
    while (threads_.size() - busy_ < tasks_.size()) threads_.emplace_back([this] { work(); });
    changed_.notify_all();
    changed_.wait(lock, [&] { return left == 0; });
  }

 private:
  struct Task {
    const std::function<void(unsigned)>* job;
    unsigned index;
    unsigned* left;  ///< tasks of the same run that have not ended
  };

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return is_closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const Task task = tasks_.back();
      tasks_.pop_back();
      ++busy_;
      lock.unlock();
      (*task.job)(task.index);
      lock.lock();
      --busy_;
      if (--*task.left == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
  std::vector<Task> tasks_;
  size_t busy_ = 0;
  bool is_closing_ = false;
};

/// Null, or what went wrong, valid until this thread's next launch. Thread-safe.
inline const char* run_grid(unsigned blocks, unsigned threads, bool cooperative, const std::function<void()>& body) {
  static Pool pool;
  static thread_local char problem[256];
  if (blocks == 0 || threads == 0 || threads > 1024) return "emulation: a launch without blocks or threads";
  Launch launch{blocks, threads, body, options};
  if (cooperative) {
    pool.run(blocks, [&](unsigned index) { run_block(launch, index, true); });
  } else {
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; ++i) order[i] = i;
    std::mt19937 random(launch.options.seed);
    if (launch.options.seed != 0) std::shuffle(order.begin(), order.end(), random);
    for (const unsigned index : order) {
      if (!launch.has_failed) run_block(launch, index, false);
    }
  }
  if (!launch.has_failed) return nullptr;
  memcpy(problem, launch.problem, sizeof(problem));
  return problem;
}

}  // namespace muster::kernels::cuda::emulation

// --- what a kernel sees ----------------------------------------------------------------------------------------------

#define threadIdx (::muster::kernels::cuda::emulation::read(::muster::kernels::cuda::emulation::this_fiber().index))
#define blockIdx (::muster::kernels::cuda::emulation::read(::muster::kernels::cuda::emulation::this_block.index))
#define blockDim (::muster::kernels::cuda::emulation::read(::muster::kernels::cuda::emulation::this_block.size))
#define gridDim (::muster::kernels::cuda::emulation::read(::muster::kernels::cuda::emulation::this_block.grid))
#define MUSTER_TEXT_OF(x) #x
#define MUSTER_TEXT(x) MUSTER_TEXT_OF(x)
#define MUSTER_SITE __FILE__ ":" MUSTER_TEXT(__LINE__)
#define __syncthreads() ::muster::kernels::cuda::emulation::sync_block(MUSTER_SITE)
#define __syncwarp() ::muster::kernels::cuda::emulation::sync_warp(MUSTER_SITE)
#define __shfl_xor_sync(mask, value, distance) \
  ::muster::kernels::cuda::emulation::shuffle( \
      mask, value, ::muster::kernels::cuda::emulation::this_lane() ^ static_cast<unsigned>(distance), MUSTER_SITE)
#define __shfl_down_sync(mask, value, distance) \
  ::muster::kernels::cuda::emulation::shuffle(  \
      mask, value, ::muster::kernels::cuda::emulation::this_lane() + static_cast<unsigned>(distance), MUSTER_SITE)

namespace muster::kernels::cuda {

template <class T>
T load_acquire_system(T* p) {
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

template <class T>
void store_release_system(T* p, T value) {
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

// For mutants.
template <class T>
T load_relaxed_system(T* p) {
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}

template <class T>
void store_relaxed_system(T* p, T value) {
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}

inline void spin_pause() {
  const emulation::Hidden hidden;
  emulation::wait(emulation::Waiting::spinning, "");
}

/// A vector access must be aligned; x86 would not mind.
inline void check_access(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes == 0) return;
  const emulation::Hidden hidden;
  emulation::fail("a misaligned vector access");
  emulation::wait(emulation::Waiting::failed, "");
}

inline bool is_captured(Stream) noexcept { return emulation::options.is_captured; }

inline Status count_multiprocessors(unsigned& count) noexcept {
  count = emulation::options.multiprocessors;
  return {};
}

template <class... Parameters>
Status count_resident(void (*)(Parameters...), unsigned, unsigned& count) noexcept {
  count = emulation::options.resident;
  return {};
}

template <class... Parameters>
Status find_code(void (*)(Parameters...), int& capability) noexcept {
  capability = emulation::options.capability;
  if (emulation::options.has_code) return {};
  return {Status::Code::not_built, "emulation: no kernel image is available"};
}

}  // namespace muster::kernels::cuda
