#include "gradient/peer_average.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "comm/peer_memory.h"
#include "core/flat_layout.h"
#include "core/ownership.h"
#include "device/kernel_dtype.h"
#include "kernels/kernels.h"
#include "muster/error.h"

namespace muster {

namespace {

constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
constexpr int64_t kTilesOfThread = 64;  // below that a second thread costs more than it spares

// The mean over ranks of `n` elements, which are at places[r] on rank r, into all of these. So few stay in a core's
// cache meanwhile.
template <class T>
void store_means(at::ScalarType dtype, const std::vector<void*>& places, size_t own_rank, int64_t n) {
  T* const own = static_cast<T*>(places[own_rank]);
  kernels::tree_reduce(kernel_dtype(dtype), kernels::Reduction::sum, places.data(), static_cast<int>(places.size()),
                       &places[own_rank], 1, static_cast<size_t>(n));
  const auto divisor = static_cast<T>(places.size());
  for (int64_t i = 0; i < n; ++i) own[i] = own[i] / divisor;
  for (void* place : places) {
    if (place != own) std::memcpy(place, own, static_cast<size_t>(n) * sizeof(T));
  }
}

// The means of a rank's share of one tensor, which is at tensors[r] on rank r.
template <class T>
void store_share(const at::Tensor& tensor, const std::vector<void*>& tensors, size_t own_rank) {
  const auto share = owned_runs(tensor.numel(), static_cast<int>(tensors.size()), kTile)[own_rank];
  const int64_t tiles = (share.count + kTile - 1) / kTile;
  at::parallel_for(0, tiles, kTilesOfThread, [&](int64_t first, int64_t last) {
    std::vector<void*> places(tensors.size());
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t begin = tile * kTile;
      for (size_t r = 0; r < tensors.size(); ++r) places[r] = static_cast<T*>(tensors[r]) + share.begin + begin;
      store_means<T>(tensor.scalar_type(), places, own_rank, std::min(kTile, share.count - begin));
    }
  });
}

// Of what all ranks' tensors agree in.
uint64_t digest_of_sizes(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors) {
    sizes.push_back(tensor.numel());
    sizes.push_back(static_cast<int64_t>(tensor.scalar_type()));
  }
  return stable_hash({reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t)});
}

}  // namespace

std::optional<PeerAverage> PeerAverage::over(comm::Communicator& communicator) {
  if (communicator.peer_memory() == nullptr || communicator.size() > kernels::kMaxReduceRanks) return std::nullopt;
  return PeerAverage(communicator);
}

std::vector<bool> PeerAverage::may_change(const std::vector<at::Tensor>& tensors) const {
  const auto begin = [&](size_t i) { return reinterpret_cast<uintptr_t>(tensors[i].const_data_ptr()); };
  std::vector<bool> may(tensors.size(), false);
  std::vector<size_t> reached;
  for (size_t i = 0; i < tensors.size(); ++i) {
    may[i] = tensors[i].defined() && address_of(tensors[i]);
    if (may[i]) reached.push_back(i);
  }
  std::sort(reached.begin(), reached.end(), [&](size_t a, size_t b) { return begin(a) < begin(b); });
  uintptr_t end = 0;  // of those that begin before
  for (size_t at = 0; at < reached.size(); ++at) {
    const size_t i = reached[at];
    if (begin(i) < end) may[i] = may[reached[at - 1]] = false;
    end = std::max(end, begin(i) + tensors[i].nbytes());
  }
  return may;
}

std::optional<uint64_t> PeerAverage::address_of(const at::Tensor& tensor) const noexcept {
  return communicator_->peer_memory()->address_of(tensor.const_data_ptr(), tensor.nbytes());
}

void PeerAverage::average(const std::vector<at::Tensor>& tensors) {
  auto& peers = *communicator_->peer_memory();
  const auto count = static_cast<int64_t>(tensors.size());
  if (!addresses_.defined() || addresses_.numel() < count) addresses_ = communicator_->allocate(count, at::kLong);
  const auto addresses = addresses_.narrow(0, 0, count);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto address = address_of(tensors[i]);
    if (!address) throw InvalidArgument("peers average tensors that allocate() of their group gave; copy it there");
    static_cast<uint64_t*>(addresses.mutable_data_ptr())[i] = *address;
  }
  const int ranks = communicator_->size();
  const auto own_rank = static_cast<size_t>(communicator_->rank());
  const auto addresses_of_ranks = peers.find(addresses, digest_of_sizes(tensors), ranks);
  peers.begin_stores();
  std::vector<void*> places(static_cast<size_t>(ranks));
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int r = 0; r < ranks; ++r) {
      const auto rank = static_cast<size_t>(r);
      places[rank] = peers.at(r, static_cast<const uint64_t*>(addresses_of_ranks[rank])[i]);
    }
    if (tensors[i].scalar_type() == at::kDouble) {
      store_share<double>(tensors[i], places, own_rank);
    } else {
      store_share<float>(tensors[i], places, own_rank);
    }
  }
  communicator_->barrier().wait();
  peers.end_stores();
}

}  // namespace muster
