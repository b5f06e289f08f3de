#include "gradient/owner_reduction.h"

#include <algorithm>
#include <utility>

#include "core/plain_memory.h"
#include "device/kernel_dtype.h"
#include "kernels/kernels.h"
#include "muster/error.h"

namespace muster {

namespace {

uint64_t address_in(const comm::PeerMemory& peers, const at::Tensor& tensor) {
  if (const auto address = peers.address_of(tensor.const_data_ptr(), tensor.nbytes())) return *address;
  throw InvalidArgument("peers read buckets that allocate() of their group gave; take the bucket's memory from there");
}

}  // namespace

// One bucket: the gradients that this rank lends of it, and the runs that it owns. Its visit may come after the
// engine's end.
struct OwnerReduction::OwnedSums {
  struct Parameter {
    size_t offset;              // of its slot, in elements
    uint64_t slot;              // its address
    double* partials;           // of the owned run
    Run run;                    // the owned one
    at::Tensor lent;            // the gradient that is read instead of the slot
    double factor = 1;          // that it is multiplied by
    bool peers_read = false;    // they do so, too
    bool may_hold_sum = false;  // nobody else had it when it was lent
    bool holds_sum = false;
  };
  comm::PeerMemory& peers;
  Bucket bucket;
  at::Tensor partials;
  at::Tensor addresses;  // by parameter: where peers read this rank's gradient; then, likewise, its factor there
  int ranks;
  int rank;
  double norm_type;
  std::vector<Parameter> parameters;  // in the bucket's order

  uint64_t& address(size_t i) const { return static_cast<uint64_t*>(addresses.mutable_data_ptr())[i]; }
  double& factor_for_peers(size_t i) const {
    return static_cast<double*>(addresses.mutable_data_ptr())[parameters.size() + i];
  }

  void read_from_slot(size_t i) {
    auto& parameter = parameters[i];
    parameter.lent.reset();
    parameter.peers_read = parameter.may_hold_sum = parameter.holds_sum = false;
    parameter.factor = 1;
    address(i) = parameter.slot;
    factor_for_peers(i) = 1;
  }

  void let_go(bool of_sums) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].lent.defined() && (of_sums || !parameters[i].holds_sum)) read_from_slot(i);
    }
  }

  // data[r]: rank r's addresses.
  void sum(void* const* data) {
    const auto size = static_cast<size_t>(ranks);
    const size_t read_size = bucket.travelling().element_size();
    const size_t sum_size = bucket.sums.element_size();
    auto* const sums = static_cast<std::byte*>(bucket.sums.mutable_data_ptr());
    std::vector<const void*> gradients(parameters.size() * size);
    std::vector<double> factors(parameters.size() * size, 1.0);
    std::vector<kernels::ReduceSegment> segments;
    segments.reserve(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto& parameter = parameters[i];
      if (parameter.run.count == 0) continue;
      const auto first = static_cast<size_t>(parameter.run.begin);
      const void** sources = gradients.data() + i * size;
      for (int r = 0; r < ranks; ++r) {
        const void* whole = peers.at(r, static_cast<const uint64_t*>(data[r])[i]);
        double& factor = factors[i * size + static_cast<size_t>(r)];
        factor = static_cast<const double*>(data[r])[parameters.size() + i];
        if (r == rank && parameter.lent.defined()) {
          whole = parameter.lent.const_data_ptr();
          factor = parameter.factor;
        }
        sources[r] = static_cast<const std::byte*>(whole) + first * read_size;
      }
      const double* const first_factor = factors.data() + i * size;
      const bool is_scaled = std::any_of(first_factor, first_factor + size, [](double factor) { return factor != 1; });
      parameter.holds_sum = parameter.may_hold_sum && parameter.lent.use_count() == 1;
      auto* const whole_sum = parameter.holds_sum ? static_cast<std::byte*>(parameter.lent.mutable_data_ptr())
                                                  : sums + parameter.offset * sum_size;
      segments.push_back({sources, whole_sum + first * sum_size, parameter.partials,
                          static_cast<size_t>(parameter.run.count), is_scaled ? first_factor : nullptr});
    }
    kernels::reduce_stats(kernel_dtype(bucket.travelling().scalar_type()), ranks, segments.data(), segments.size(),
                          norm_type);
    for (auto& parameter : parameters) {
      if (!parameter.peers_read) parameter.lent.reset();
    }
  }
};

bool OwnerReduction::is_possible(comm::Communicator& communicator) {
  return communicator.peer_memory() != nullptr && communicator.size() <= kernels::kMaxReduceRanks;
}

OwnerReduction::OwnerReduction(comm::Communicator& communicator, const Buckets& buckets, size_t least_lent_bytes,
                               double norm_type)
    : peers_(*communicator.peer_memory()),
      digest_(buckets.layout().digest()),
      rank_(communicator.rank()),
      least_lent_bytes_(least_lent_bytes),
      norm_type_(norm_type) {
  constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
  const int ranks = communicator.size();
  const auto num_parameters = buckets.parameters().size();
  const auto in_layout = owned_runs(buckets.layout(), ranks, kTile);
  size_t next_in_layout = 0;
  size_t tiles = 0;
  for (size_t p = 0; p < num_parameters; ++p) {
    const auto numel = num_reals(buckets.parameters()[p].tensor);
    runs_.push_back(buckets.holds(p) ? in_layout[next_in_layout++] : owned_runs(numel, ranks, kTile));
    first_tile_.push_back(tiles);
    tiles += kernels::num_tiles(static_cast<size_t>(numel));
  }
  partials_ = communicator.allocate(std::max<int64_t>(static_cast<int64_t>(tiles), 1), at::kDouble);
  for (void* data : peers_.find(partials_, digest_, ranks)) {
    partials_of_ranks_.push_back(static_cast<const double*>(data));
  }
  places_.resize(num_parameters);
  for (size_t b = 0; b < buckets.size(); ++b) {
    const auto& bucket = buckets[b];
    const auto count = static_cast<int64_t>(bucket.parameters.size());
    owned_.push_back(std::make_shared<OwnedSums>(OwnedSums{
        peers_, bucket, partials_, communicator.allocate(2 * count, at::kLong), ranks, rank_, norm_type, {}}));
    const auto& read = bucket.travelling();
    if (read.numel() == 0) continue;
    const uint64_t address = address_in(peers_, read);
    auto& sums = *owned_.back();
    for (const int index : bucket.parameters) {
      const auto p = static_cast<size_t>(index);
      const auto offset = static_cast<size_t>(buckets.slot(p).offset);
      places_[p] = {&sums, sums.parameters.size()};
      sums.parameters.push_back({offset, address + offset * read.element_size(), own_partials(p), run(p, rank_), {}});
    }
    for (size_t i = 0; i < sums.parameters.size(); ++i) sums.read_from_slot(i);
  }
}

OwnerReduction::~OwnerReduction() = default;

Run OwnerReduction::offer(size_t p, const at::Tensor& gradient, bool is_sole, double factor) {
  const auto [sums, index] = places_[p];
  if (sums == nullptr) return run(p, rank_);
  auto& parameter = sums->parameters[index];
  parameter.lent = gradient;
  parameter.factor = factor;
  std::optional<uint64_t> address;
  if (gradient.nbytes() >= least_lent_bytes_) {
    address = peers_.address_of(gradient.const_data_ptr(), gradient.nbytes());
  }
  if (address) {
    sums->address(index) = *address;
    sums->factor_for_peers(index) = factor;
  }
  parameter.peers_read = address.has_value();
  // Other gradients' memory is used again before the step.
  parameter.may_hold_sum = parameter.peers_read && is_sole;
  return parameter.peers_read ? Run{0, gradient.numel()} : parameter.run;
}

std::optional<BucketReduction::Lent> OwnerReduction::take_back(size_t p) {
  const auto [sums, index] = places_[p];
  if (sums == nullptr) return std::nullopt;
  const auto& parameter = sums->parameters[index];
  if (!parameter.lent.defined()) return std::nullopt;
  const Run whole{0, parameter.lent.numel()};
  Lent lent{parameter.lent, parameter.peers_read ? whole : parameter.run, parameter.factor};
  sums->read_from_slot(index);
  return lent;
}

void OwnerReduction::release() noexcept {
  for (const auto& sums : owned_) sums->let_go(/*of_sums=*/false);
}

void OwnerReduction::open_window() noexcept {
  for (const auto& sums : owned_) sums->let_go(/*of_sums=*/true);
}

const at::Tensor& OwnerReduction::sum_of(size_t p) const noexcept {
  const auto [sums, index] = places_[p];
  const bool holds_sum = sums != nullptr && sums->parameters[index].holds_sum;
  return holds_sum ? sums->parameters[index].lent : BucketReduction::sum_of(p);
}

comm::Work OwnerReduction::reduce(size_t bucket) {
  auto& owned = owned_[bucket];
  fill_wire(owned->bucket);
  if (owned->bucket.travelling().numel() == 0) return {};
  return peers_.visit(owned->addresses, digest_ + bucket, [owned](void* const* data) { owned->sum(data); });
}

double* OwnerReduction::own_partials(size_t p) const {
  return partials_.mutable_data_ptr<double>() + first_tile_[p] +
         static_cast<size_t>(run(p, rank_).begin) / kernels::kTile;
}

bool OwnerReduction::note_changed(size_t p, const at::Tensor& sum) {
  const auto own = elements_of(sum, run(p, rank_));
  const kernels::StatsSegment segment{own.const_data_ptr(), own_partials(p), static_cast<size_t>(own.numel()),
                                      kernel_dtype(own.scalar_type())};
  kernels::grad_stats(&segment, 1, norm_type_);
  return true;
}

void OwnerReduction::add_partials(size_t p, double norm_type, kernels::NormSum& sum) const {
  for (size_t r = 0; r < runs_[p].size(); ++r) {
    const auto& owned = runs_[p][r];
    const auto tile = static_cast<size_t>(owned.begin) / kernels::kTile;
    const auto tiles = kernels::num_tiles(static_cast<size_t>(owned.count));
    const double* const partials = partials_of_ranks_[r] + first_tile_[p] + tile;
    for (size_t t = 0; t < tiles; ++t) kernels::add_partial(sum, partials[t], norm_type);
  }
}

}  // namespace muster
