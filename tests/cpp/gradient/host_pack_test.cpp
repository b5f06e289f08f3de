#include "gradient/host_pack.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "cpp/catch.h"

namespace muster {
namespace {

// Reads the given run of whatever it is offered.
struct Reader final : BucketReduction {
  explicit Reader(Run run) : run(run) {}
  bool reads_gradients() const noexcept override { return true; }
  Run offer(size_t p, const at::Tensor& gradient, bool is_sole, double factor) override {
    offered.push_back(p);
    was_sole = is_sole;
    lent = Lent{gradient, run, factor};
    return run;
  }
  std::optional<Lent> take_back(size_t p) override {
    return !offered.empty() && offered.back() == p ? std::exchange(lent, std::nullopt) : std::nullopt;
  }
  comm::Work reduce(size_t) override { return {}; }

  Run run;
  std::vector<size_t> offered;
  bool was_sole = false;
  std::optional<Lent> lent;
};

struct Packed {
  explicit Packed(at::ScalarType dtype = at::kFloat)
      : buckets({{"a", at::zeros({4}, dtype)}, {"b", at::zeros({4}, dtype)}}) {
    buckets.lay_out({}, 1 << 20, 1 << 20, 0);
    buckets.allocate(*comm::make_single(), std::nullopt);
    buckets[0].sums.fill_(100);
  }
  void grad(size_t p, double value) {
    buckets.parameters()[p].tensor.mutable_grad() = at::full({4}, value, at::kFloat);
  }
  void pack(const Packing& packing) { pack_on_host(buckets, 0, packing, states, reader); }
  double at(size_t p, int64_t i) const { return buckets.view(p)[i].item<double>(); }

  Buckets buckets;
  std::vector<GradientState> states{2};
  Reader reader{{1, 2}};
};

}  // namespace

TEST_CASE("a bucket is overwritten first and added to later", "[gradient]") {
  Packed packed;
  packed.grad(0, 3);
  packed.pack({.factor = 2});
  CHECK(packed.at(0, 0) == 6);
  CHECK(packed.at(1, 0) == 0);
  CHECK_FALSE(packed.buckets.parameters()[0].tensor.grad().defined());
  CHECK(packed.states[0].dense_used);
  CHECK_FALSE(packed.states[1].dense_used);
  packed.grad(0, 1);
  packed.grad(1, 5);
  packed.pack({});  // the same micro-batch: both add
  CHECK(packed.at(0, 0) == 7);
  CHECK(packed.at(1, 0) == 5);
  packed.states.assign(2, {});
  packed.grad(1, 1);
  packed.pack({.overwrites = false, .drops = true});
  CHECK(packed.at(1, 0) == 5);
  packed.states.assign(2, {});
  packed.pack({});
  CHECK(packed.at(0, 0) == 0);
}

TEST_CASE("what is read in place is not packed", "[gradient]") {
  Packed packed;
  packed.grad(0, 3);
  packed.states[0].is_sole = true;
  packed.pack({.may_offer = true, .factor = 2});
  CHECK(packed.reader.offered == std::vector<size_t>{0});
  CHECK(packed.reader.was_sole);
  CHECK(packed.at(0, 0) == 6);
  CHECK(packed.at(0, 1) == 100);
  CHECK(packed.at(0, 2) == 100);
  CHECK(packed.at(0, 3) == 6);
}

TEST_CASE("what was read in place is packed where more comes", "[gradient]") {
  Packed packed;
  packed.grad(0, 3);
  packed.pack({.may_offer = true, .factor = 2});
  packed.grad(0, 1);
  packed.pack({.may_offer = true, .factor = 2});
  CHECK(packed.buckets.view(0).equal(at::full({4}, 8, at::kFloat)));
  CHECK(packed.reader.offered.size() == 1);
}

TEST_CASE("nothing is offered unless the micro-batch allows it", "[gradient]") {
  Packed packed;
  packed.grad(0, 3);
  packed.pack({});
  CHECK(packed.reader.offered.empty());
  CHECK(packed.buckets.view(0).equal(at::full({4}, 3, at::kFloat)));
}

TEST_CASE("an fp32 gradient of a low-precision parameter is packed, and read, as it is", "[gradient]") {
  Packed packed(at::kBFloat16);
  const double value = 1 + 1.0 / 4096;
  packed.grad(0, value);
  packed.pack({});
  CHECK(packed.buckets.view(0).equal(at::full({4}, value, at::kFloat)));
  packed.states.assign(2, {});
  packed.grad(0, value);
  packed.pack({.may_offer = true});
  REQUIRE(packed.reader.offered == std::vector<size_t>{0});
  CHECK(packed.reader.lent->gradient.equal(at::full({4}, value, at::kFloat)));
}

}  // namespace muster
