// A value that the ranks of a test share, be they threads or forked processes.
#pragma once

#include <sys/mman.h>

#include <new>

namespace muster::testing {

/// Made before the ranks are.
template <class T>
class SharedValue {
 public:
  SharedValue()
      : value_(new (::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T{}) {}
  ~SharedValue() { ::munmap(value_, sizeof(T)); }
  SharedValue(const SharedValue&) = delete;
  SharedValue& operator=(const SharedValue&) = delete;
  T* operator->() const { return value_; }

 private:
  T* value_;
};

}  // namespace muster::testing
