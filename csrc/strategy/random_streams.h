// The random streams of a strategy's replicas: a function of seed, replica and call.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "core/replica_context.h"

namespace muster {

/// A call's stream is given by its replica's thread; the rest is done by the thread that steps.
class RandomStreams {
 public:
  /// `devices`: of the local replicas.
  RandomStreams(const std::vector<c10::Device>& devices, uint64_t seed);

  uint64_t seed() const noexcept { return seed_; }

  /// Begins a call of step, run or flush: its number, from 1, by which streams and the scopes of step collectives go.
  uint64_t begin_call() noexcept { return ++calls_; }
  /// Begun so far.
  uint64_t calls() const noexcept { return calls_; }
  /// Goes on after as many calls as other workers, or those of a job before this one, have made.
  void follow(uint64_t calls) noexcept { calls_ = calls; }
  /// Gives calls from here on the streams of another job's seed.
  void take_seed(uint64_t seed) noexcept { seed_ = seed; }

  /// Gives a replica's context its generators, at the beginning of the call's stream.
  void give(ReplicaContext& context, uint64_t call);

 private:
  uint64_t seed_;
  uint64_t calls_ = 0;
  std::vector<at::Generator> on_host_;    // by local replica
  std::vector<at::Generator> on_device_;  // likewise; undefined on the CPU
};

}  // namespace muster
