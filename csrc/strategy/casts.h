// Torch's cache of cast parameters, which all threads share, around the calls of replicas.
#pragma once

#include <ATen/autocast_mode.h>

namespace muster {

/// For one of several replicas, around its step function and backward, where checkpointing and custom functions enter
/// autocast again: leaves torch's cache of cast parameters alone, which all threads share. Clearing it frees tensors
/// under torch's mutex; to free one that Python knows takes the GIL, and who has that may be waiting for the mutex. And
/// gradients of a parameter's uses add up in the precision of the cast that they share: bits would depend on when
/// another replica clears it.
class KeptCasts {
 public:
  KeptCasts() { at::autocast::increment_nesting(); }
  ~KeptCasts() { at::autocast::decrement_nesting(); }
  KeptCasts(const KeptCasts&) = delete;
  KeptCasts& operator=(const KeptCasts&) = delete;
};

/// Around an Autocast, which would clear the cache if it found another one's.
class WithoutAutocast {
 public:
  explicit WithoutAutocast(c10::DeviceType device)
      : device_(device), was_enabled_(at::autocast::is_autocast_enabled(device)) {
    at::autocast::set_autocast_enabled(device_, false);
  }
  ~WithoutAutocast() { at::autocast::set_autocast_enabled(device_, was_enabled_); }
  WithoutAutocast(const WithoutAutocast&) = delete;
  WithoutAutocast& operator=(const WithoutAutocast&) = delete;

 private:
  c10::DeviceType device_;
  bool was_enabled_;
};

/// Around a step function that may enter autocast itself: its casts are not cached, unless it asks for that. Whoever
/// leaves an autocast clears the cache of all threads, so that bits would depend on what other replicas do; and casts
/// that outlived their autocast would serve one of another dtype, or one with gradients what was cast without.
class UncachedCasts {
 public:
  UncachedCasts() : was_enabled_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~UncachedCasts() { at::autocast::set_autocast_cache_enabled(was_enabled_); }
  UncachedCasts(const UncachedCasts&) = delete;
  UncachedCasts& operator=(const UncachedCasts&) = delete;

 private:
  bool was_enabled_;
};

}  // namespace muster
