// What every BucketReduction among ranks does, whoever gets the sums.
#include "gradient/bucket_reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <optional>

#include "core/ownership.h"
#include "cpp/catch.h"
#include "gradient/all_reduction.h"
#include "gradient/host_pack.h"
#include "gradient/owner_reduction.h"
#include "gradient/shard_reduction.h"
#include "kernels/kernels.h"
#include "support/fake_nccl.h"
#include "support/run_ranks.h"

namespace muster {
namespace {

using comm::Communicator;
using namespace testing;

constexpr int64_t kReducedLarge = 3 * static_cast<int64_t>(kernels::kTile) + 5;
constexpr int64_t kReducedSmall = 6;

// Every rank has every sum.
struct All {
  static std::unique_ptr<BucketReduction> make(Communicator& c, const Buckets& buckets) {
    return std::make_unique<AllReduction>(c, buckets, /*receive=*/true);
  }
  static Run run(const BucketReduction&, const Buckets& buckets, size_t p, int) { return {0, buckets.view(p).numel()}; }
};

// Each rank has those of its own runs.
struct Owners {
  static std::unique_ptr<BucketReduction> make(Communicator& c, const Buckets& buckets) {
    return std::make_unique<OwnerReduction>(c, buckets, sizeof(float) * kReducedLarge, 2.0);
  }
  static Run run(const BucketReduction& reduction, const Buckets&, size_t p, int rank) {
    return dynamic_cast<const OwnerReduction&>(reduction).run(p, rank);
  }
};

// Likewise, by the communicator's own reduction.
struct Sharded {
  static std::unique_ptr<BucketReduction> make(Communicator& c, const Buckets& buckets) {
    Shards shards(static_cast<size_t>(c.size()));
    for (const auto& parameter : buckets.parameters()) {
      const auto runs = owned_runs(parameter.tensor.numel(), c.size(), static_cast<int64_t>(kernels::kTile));
      for (size_t r = 0; r < runs.size(); ++r) shards[r].push_back(runs[r]);
    }
    return std::make_unique<ShardReduction>(c, buckets, std::make_shared<const Shards>(std::move(shards)));
  }
  static Run run(const BucketReduction& reduction, const Buckets&, size_t p, int rank) {
    return dynamic_cast<const ShardReduction&>(reduction).shards()->at(static_cast<size_t>(rank))[p];
  }
};

template <class R, class B>
struct On {
  using Reduction = R;
  using Backend = B;
};

template <class R>
struct BucketReplica {
  explicit BucketReplica(Communicator& c, std::optional<at::ScalarType> wire = std::nullopt)
      : communicator(c),
        buckets({{"large", at::zeros({kReducedLarge})}, {"small", at::zeros({2, kReducedSmall / 2})}}) {
    buckets.lay_out({}, /*bucket_bytes=*/1, 1, 0);
    buckets.allocate(c, wire);
    reduction = R::make(c, buckets);
  }

  /// grad[i] = scale (rank + 1) (i % 8): exact in bf16, as its sums are.
  void window(double scale, bool may_offer) {
    reduction->open_window();
    std::vector<GradientState> states(2);
    std::vector<comm::Work> works;
    for (size_t p = 0; p < 2; ++p) {
      const auto& tensor = buckets.parameters()[p].tensor;
      tensor.mutable_grad() = values(p) * (scale * (communicator.rank() + 1));
    }
    for (size_t b = 0; b < buckets.size(); ++b) {
      pack_on_host(buckets, b, {.may_offer = may_offer && reduction->reads_gradients()}, states, *reduction);
      works.push_back(reduction->reduce(b));
    }
    for (auto& work : works) work.wait();
    reduction->finish();
    communicator.barrier().wait();
    reduction->release();
  }

  at::Tensor values(size_t p) const {
    const auto& tensor = buckets.parameters()[p].tensor;
    return (at::arange(tensor.numel()).to(at::kFloat).remainder(8)).view(tensor.sizes());
  }

  at::Tensor sum(size_t p) const {
    const auto& in_gradient = reduction->sum_of(p);
    return in_gradient.defined() ? in_gradient : buckets.view(p);
  }

  bool has_sums(double scale) const {
    const double total = scale * communicator.size() * (communicator.size() + 1) / 2;
    for (size_t p = 0; p < 2; ++p) {
      const auto run = R::run(*reduction, buckets, p, communicator.rank());
      if (!elements_of(sum(p), run).equal(elements_of(values(p) * total, run))) return false;
    }
    return true;
  }

  Communicator& communicator;
  Buckets buckets;
  std::unique_ptr<BucketReduction> reduction;
};

}  // namespace

TEMPLATE_TEST_CASE("a reduction gives each window's sums", "[gradient]", (On<All, Local>), (On<All, Host>),
                   (On<Owners, Local>), (On<Owners, Host>), (On<Sharded, Local>), (On<Sharded, Nccl>),
                   (On<Sharded, NcclOneProcess>), (On<Sharded, DeviceLocal>)) {
  CHECK(TestType::Backend::run(3, [](Communicator& c) {
          BucketReplica<typename TestType::Reduction> replica(c);
          for (const double scale : {1.0, 4.0, -0.5}) {
            replica.window(scale, /*may_offer=*/false);
            MUSTER_CHECK(replica.has_sums(scale));
          }
        }) == "");
}

TEMPLATE_TEST_CASE("a reduction that is offered gradients gives the same sums", "[gradient]", (On<All, Local>),
                   (On<All, Host>), (On<Owners, Local>), (On<Owners, Host>)) {
  CHECK(TestType::Backend::run(2, [](Communicator& c) {
          BucketReplica<typename TestType::Reduction> replica(c);
          for (const double scale : {1.0, 4.0, -0.5}) {
            replica.window(scale, /*may_offer=*/true);
            MUSTER_CHECK(replica.has_sums(scale));
          }
        }) == "");
}

TEMPLATE_TEST_CASE("a reduction gives sums of what travels in less precision", "[gradient]", (On<All, Local>),
                   (On<All, Host>), (On<Owners, Local>), (On<Owners, Host>), (On<Sharded, Local>),
                   (On<Sharded, Nccl>)) {
  CHECK(TestType::Backend::run(2, [](Communicator& c) {
          BucketReplica<typename TestType::Reduction> replica(c, at::kBFloat16);
          for (const double scale : {1.0, 4.0}) {
            replica.window(scale, /*may_offer=*/true);
            MUSTER_CHECK(replica.has_sums(scale));
            MUSTER_CHECK(replica.sum(0).scalar_type() == at::kFloat);
          }
        }) == "");
}

TEMPLATE_TEST_CASE("an offered gradient that is taken back leaves no trace", "[gradient]", (On<All, Local>),
                   (On<Owners, Local>)) {
  CHECK(TestType::Backend::run(2, [](Communicator& c) {
          BucketReplica<typename TestType::Reduction> replica(c);
          auto& reduction = *replica.reduction;
          reduction.open_window();
          const auto gradient = at::full({kReducedLarge}, 7.0);
          if (reduction.reads_gradients()) {
            const auto run = reduction.offer(0, gradient, /*is_sole=*/false, 2.0);
            const auto lent = reduction.take_back(0);
            MUSTER_CHECK(lent && lent->gradient.is_same(gradient) && lent->factor == 2.0);
            MUSTER_CHECK(lent->run.begin == run.begin && lent->run.count == run.count);
          }
          MUSTER_CHECK(!reduction.take_back(0));
          replica.window(1, /*may_offer=*/true);
          MUSTER_CHECK(replica.has_sums(1));
        }) == "");
}

TEST_CASE("peers read what a rank changes of its sums where each owns some", "[gradient]") {
  CHECK(Local::run(2, [](Communicator& c) {
          BucketReplica<All> all(c);
          all.window(1, false);
          MUSTER_CHECK(!all.reduction->note_changed(0, all.sum(0)));
          BucketReplica<Owners> owners(c);
          owners.window(1, false);
          auto& reduction = dynamic_cast<OwnerReduction&>(*owners.reduction);
          const auto norm_of = [&] {
            muster::kernels::NormSum sum;
            reduction.add_partials(0, 2, sum);
            return muster::kernels::norm_total(sum);
          };
          const double before = norm_of();
          elements_of(owners.sum(0), reduction.run(0, c.rank())).mul_(2);
          c.barrier().wait();
          MUSTER_CHECK(reduction.note_changed(0, owners.sum(0)));
          c.barrier().wait();
          MUSTER_CHECK(norm_of() == 4 * before);
          c.barrier().wait();  // it reads the other's memory
        }) == "");
}

TEST_CASE("a rank that does not receive contributes all the same", "[gradient]") {
  CHECK(Local::run(2, [](Communicator& c) {
          BucketReplica<All> replica(c);
          replica.reduction = std::make_unique<AllReduction>(c, replica.buckets, /*receive=*/c.rank() == 0);
          replica.window(2, false);
          MUSTER_CHECK(c.rank() != 0 || replica.has_sums(2));
        }) == "");
}

TEMPLATE_TEST_CASE("one rank receives, and all know it", "[gradient]", Local, Nccl, NcclOneProcess, DeviceLocal) {
  const auto wire = GENERATE(as<std::optional<at::ScalarType>>(), std::nullopt, at::kBFloat16);
  CHECK(TestType::run(3, [wire](Communicator& c) {
          BucketReplica<All> replica(c, wire);
          replica.reduction = std::make_unique<ShardReduction>(c, replica.buckets, whole_for(1, 3, replica.buckets));
          replica.window(2, false);
          MUSTER_CHECK(c.rank() != 1 || replica.has_sums(2));
        }) == "");
}

}  // namespace muster
