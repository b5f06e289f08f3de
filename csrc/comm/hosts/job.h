// One collective of several hosts, as its transport goes through it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/hosts/layout.h"
#include "comm/work.h"
#include "kernels/kernels.h"

namespace muster::comm::hosts {

/// What one worker sends to, or has from, the carriers of its stripe: bytes by worker, one after another.
class Parcels {
 public:
  Parcels() = default;
  /// `bytes`: by host. In `memory` (uint8) of so many in all, or in memory of their own.
  Parcels(const HostsLayout& layout, int stripe, const std::vector<int64_t>& bytes, at::Tensor memory = {});
  /// `places`: by host, stretches of `memory` (uint8). The parcels are these themselves where they lie there one after
  /// another, by worker, as of two hosts they do; else memory of their own, of the same sizes.
  Parcels(const HostsLayout& layout, int stripe, const at::Tensor& memory, const std::vector<Stretch>& places);

  std::byte* of_host(int host) const;
  bool is_in_place() const noexcept { return is_in_place_; }
  const at::Tensor& data() const noexcept { return data_; }              ///< uint8
  const std::vector<int64_t>& sizes() const noexcept { return sizes_; }  ///< by worker

 private:
  at::Tensor data_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> offsets_;  // by host
  bool is_in_place_ = false;
};

/// What this rank does in a collective, but for waiting and sending. Its stripe is that of its worker; ranks that carry
/// none, and those that do not lead their worker, have empty parcels and do nothing in between.
class Job {
 public:
  virtual ~Job() = default;

  /// The memory that this host's ranks see.
  virtual at::Tensor memory() const = 0;
  /// Fills it, where it is not the caller's.
  virtual void fill() {}
  /// Reads what ranks of this host have: data[i] is where the memory of the i-th lies. Must not throw.
  virtual void read(void* const* data) = 0;
  /// From what came, what is sent in return. Without a return nothing is.
  virtual bool has_return() const noexcept { return false; }
  virtual void work(void* const* /*data*/) {}
  /// Writes what came into the memory of this host's ranks.
  virtual void write(void* const* data) = 0;
  /// Hands the result to the caller, where the memory is not the caller's.
  virtual void take() {}

  Parcels sent, received;            // of the exchange
  Parcels returned, returned_to_us;  // of the results
};

/// A rank's view of who carries what.
struct Carrying {
  const HostsLayout& layout;
  int rank = 0;
  int host = 0;
  int stripe = -1;  ///< that this rank carries; -1: none
};

/// All ranks' `values` (one-dimensional) are summed, or what `reduction` says, in place. `values` lie in memory that
/// the host's ranks see; with `into` they are copied from there and back. Of what is sent and what comes as much as
/// can be is part of that memory itself.
std::unique_ptr<Job> reduce(const Carrying& carrying, const at::Tensor& values, kernels::Reduction reduction,
                            const at::Tensor& into = {});
/// `bytes` (uint8) become those of rank `source`; `scratch`, of as many, is memory that the host's ranks see.
std::unique_ptr<Job> broadcast(const Carrying& carrying, const at::Tensor& scratch, const at::Tensor& bytes,
                               int source);
/// outputs[r] (uint8) becomes rank r's `bytes`; `scratch` has room for those of all ranks.
std::unique_ptr<Job> gather(const Carrying& carrying, const at::Tensor& scratch, const at::Tensor& bytes,
                            std::vector<at::Tensor> outputs);

}  // namespace muster::comm::hosts
