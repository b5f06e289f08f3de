// A turn that one thread hands to another.
#pragma once

#include <semaphore.h>

#include <cerrno>

namespace muster::testing {

/// As std::binary_semaphore, whose waits yield the processor before they sleep: where others keep it busy, each of them
/// then lost a slice of time to those, and a simulated day took ten times as long.
class Turn {
 public:
  Turn() noexcept { ::sem_init(&semaphore_, 0, 0); }
  ~Turn() { ::sem_destroy(&semaphore_); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  void acquire() noexcept {
    while (::sem_wait(&semaphore_) != 0 && errno == EINTR) {
    }
  }
  void release() noexcept { ::sem_post(&semaphore_); }

 private:
  sem_t semaphore_;
};

}  // namespace muster::testing
