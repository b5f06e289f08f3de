#include "net/unforked.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace muster::net {

namespace {

struct OpenDescriptors {
  std::mutex mutex;
  std::set<int> numbers;  // guarded by mutex
};

OpenDescriptors& open_descriptors() {
  static auto& instance = *new OpenDescriptors;  // there as long as static objects that hold descriptors
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork([] { instance.mutex.lock(); }, [] { instance.mutex.unlock(); },
                     [] {
                       const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
                       // The numbers stay taken: their owners close them.
                       for (const int number : instance.numbers) {
                         if (nothing < 0 || ::dup3(nothing, number, O_CLOEXEC) < 0) ::close(number);
                       }
                       ::close(nothing);
                       instance.numbers.clear();
                       instance.mutex.unlock();
                     });
  });
  return instance;
}

}  // namespace

UnforkedDescriptor::UnforkedDescriptor(const std::function<FileDescriptor()>& open) {
  const std::lock_guard lock(open_descriptors().mutex);
  descriptor_ = open();
  if (descriptor_) open_descriptors().numbers.insert(descriptor_.get());
}

UnforkedDescriptor::~UnforkedDescriptor() {
  const std::lock_guard lock(open_descriptors().mutex);
  open_descriptors().numbers.erase(descriptor_.get());
  descriptor_ = {};
}

}  // namespace muster::net
