#include "kernels/cuda/peers.h"

namespace muster::kernels::cuda {
namespace {

constexpr Status kBadPeers{Status::Code::invalid,
                           "1 to 8 peers of 1 to 64 blocks take part, and a launch plays one or all"};
constexpr Status kBadDtype{Status::Code::invalid, "peers add f32, f64 and, in reductions alone, bf16"};

bool are_valid(const Peers& peers) noexcept {
  return peers.size >= 1 && peers.size <= kMaxPeers && peers.blocks >= 1 && peers.blocks <= kMaxPeerBlocks &&
         peers.rank >= kAllRanks && peers.rank < peers.size;
}

/// All blocks at once, or one could wait for another that has no room.
template <class... Parameters>
Status launch_peers(const Peers& peers, void (*kernel)(Parameters...), Stream stream,
                    const std::type_identity_t<Parameters>&... arguments) noexcept {
  const unsigned ranks = peers.rank == kAllRanks ? static_cast<unsigned>(peers.size) : 1;
  return launch(kernel, {ranks * peers.blocks, kPeerThreads, true}, stream, arguments...);
}

/// call(integral_constant) for a count from 1 to kMaxPeers.
template <int kCount = 1, class Call>
Status with_count(int count, const Call& call) noexcept {
  if constexpr (kCount < kMaxPeers) {
    if (count > kCount) return with_count<kCount + 1>(count, call);
  }
  return call(std::integral_constant<int, kCount>{});
}

// --- sums ------------------------------------------------------------------------------------------------------------

template <class S>
struct Sum {
  S* sources[kMaxPeers];
  S* destinations[kMaxPeers];
  int num_destinations;
  uint64_t n;
};

template <int kCount, class S>
MUSTER_KERNEL void __launch_bounds__(kPeerThreads, 2) tree_sum_kernel(MUSTER_GRID_CONSTANT(Sum<S>) a) {
  sum_vectors<kCount>(a.sources, a.destinations, a.num_destinations, a.n,
                      uint64_t{blockIdx.x} * kPeerThreads + threadIdx.x, uint64_t{gridDim.x} * kPeerThreads);
}

template <int kCount, class S>
MUSTER_KERNEL void __launch_bounds__(kPeerThreads, 2) peer_reduce_kernel(MUSTER_GRID_CONSTANT(PeerReduction<S>) a) {
  Place place = enter_peers(a.peers);
  peer_reduce_round<kCount>(a, place);
  leave_peers(a.peers, place);
}

template <class S>
Status tree_sum_of(const void* const* sources, int num_sources, void* const* destinations, int num_destinations,
                   size_t n, Stream stream) noexcept {
  Sum<S> sum{};
  for (int r = 0; r < num_sources; ++r) sum.sources[r] = static_cast<S*>(const_cast<void*>(sources[r]));
  for (int r = 0; r < num_destinations; ++r) sum.destinations[r] = static_cast<S*>(destinations[r]);
  sum.num_destinations = num_destinations;
  sum.n = n;
  constexpr uint64_t kPerBlock = kPeerThreads * kVectorBytes / sizeof(S);
  return with_count(num_sources, [&](auto count) {
    return launch_over((n + kPerBlock - 1) / kPerBlock, 8, tree_sum_kernel<count(), S>, kPeerThreads, stream, sum);
  });
}

template <class S>
Status peer_reduce_of(const Peers& peers, void* const* buffers, size_t n, Stream stream) noexcept {
  PeerReduction<S> arguments{peers, {}, n};
  for (int r = 0; r < peers.size; ++r) arguments.buffers[r] = static_cast<S*>(buffers[r]);
  return with_count(peers.size,
                    [&](auto count) { return launch_peers(peers, peer_reduce_kernel<count(), S>, stream, arguments); });
}

// --- reduce_step -----------------------------------------------------------------------------------------------------

template <class Optimizer, class T>
MUSTER_KERNEL void __launch_bounds__(kPeerThreads, 1) reduce_step_kernel(MUSTER_GRID_CONSTANT(PeerStep) a) {
  Place place = enter_peers(a.peers);
  reduce_step_round<Optimizer, T>(a, place);
  leave_peers(a.peers, place);
}

template <class Optimizer>
Status reduce_step(const Peers& peers, const ReduceStep& step, Stream stream) noexcept {
  if (!are_valid(peers)) return kBadPeers;
  const PeerStep arguments{peers, step};
  switch (step.dtype) {
    case DType::f32:
      return launch_peers(peers, reduce_step_kernel<Optimizer, float>, stream, arguments);
    case DType::f64:
      return launch_peers(peers, reduce_step_kernel<Optimizer, double>, stream, arguments);
    default:
      return kBadDtype;
  }
}

}  // namespace

Status tree_sum(DType dtype, const void* const* sources, int num_sources, void* const* destinations,
                int num_destinations, size_t n, Stream stream) noexcept {
  if (num_sources < 1 || num_sources > kMaxPeers || num_destinations < 1 || num_destinations > kMaxPeers) {
    return kBadPeers;
  }
  switch (dtype) {
    case DType::f32:
      return tree_sum_of<float>(sources, num_sources, destinations, num_destinations, n, stream);
    case DType::f64:
      return tree_sum_of<double>(sources, num_sources, destinations, num_destinations, n, stream);
    case DType::bf16:
      return tree_sum_of<BFloat16>(sources, num_sources, destinations, num_destinations, n, stream);
    default:
      return kBadDtype;
  }
}

Status peer_reduce(const Peers& peers, DType dtype, void* const* buffers, size_t n, Stream stream) noexcept {
  if (!are_valid(peers)) return kBadPeers;
  switch (dtype) {
    case DType::f32:
      return peer_reduce_of<float>(peers, buffers, n, stream);
    case DType::f64:
      return peer_reduce_of<double>(peers, buffers, n, stream);
    case DType::bf16:
      return peer_reduce_of<BFloat16>(peers, buffers, n, stream);
    default:
      return kBadDtype;
  }
}

Status reduce_adam_step(const Peers& peers, const ReduceStep& arguments, Stream stream) noexcept {
  return reduce_step<Adam>(peers, arguments, stream);
}
Status reduce_sgd_step(const Peers& peers, const ReduceStep& arguments, Stream stream) noexcept {
  return reduce_step<Sgd>(peers, arguments, stream);
}
Status reduce_adagrad_step(const Peers& peers, const ReduceStep& arguments, Stream stream) noexcept {
  return reduce_step<Adagrad>(peers, arguments, stream);
}

}  // namespace muster::kernels::cuda
