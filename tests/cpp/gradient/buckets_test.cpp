#include "gradient/buckets.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"

namespace muster {

TEST_CASE("each parameter has a view of its sizes in a bucket, in memory order", "[gradient]") {
  Buckets buckets(
      {{"a", at::zeros({3, 2}).t()}, {"b", at::zeros({4}, at::kDouble)}, {"c", at::zeros({2}, at::kComplexFloat)}});
  buckets.lay_out({}, 1 << 20, 1 << 20, 0);
  CHECK_FALSE(buckets.view(0).defined());
  buckets.allocate(*comm::make_single(), std::nullopt);
  CHECK(buckets.view(0).sizes() == at::IntArrayRef({2, 3}));
  CHECK(buckets.view(0).strides() == at::IntArrayRef({1, 2}));
  CHECK(buckets.view(0).scalar_type() == at::kFloat);
  CHECK(buckets.view(1).scalar_type() == at::kDouble);
  CHECK(buckets.view(2).scalar_type() == at::kComplexFloat);
  size_t held = 0;
  for (size_t b = 0; b < buckets.size(); ++b) held += buckets[b].parameters.size();
  CHECK(held == 3);
  buckets[static_cast<size_t>(buckets.slot(2).bucket)].sums.fill_(1);
  CHECK(at::real(buckets.view(2)).equal(at::ones({2})));
  CHECK(at::imag(buckets.view(2)).equal(at::ones({2})));
}

TEST_CASE("a parameter that is left out is in no bucket of the next layout", "[gradient]") {
  Buckets buckets({{"a", at::zeros({4})}, {"rows", at::zeros({4}), /*has_rows=*/true}, {"c", at::zeros({4})}});
  CHECK_FALSE(buckets.holds(1));
  buckets.leave_out(0);
  buckets.lay_out({2, 1, 0}, 1 << 20, 1 << 20, 0);
  buckets.allocate(*comm::make_single(), std::nullopt);
  REQUIRE(buckets.size() == 1);
  CHECK(buckets[0].parameters == std::vector<int>{2});
  CHECK_FALSE(buckets.view(0).defined());
  CHECK_FALSE(buckets.view(1).defined());
  CHECK(buckets.view(2).numel() == 4);
}

TEST_CASE("a bucket's order is that of its gradients", "[gradient]") {
  Buckets buckets({{"a", at::zeros({4})}, {"b", at::zeros({4})}, {"c", at::zeros({4})}});
  buckets.lay_out({1, 0, 2}, 1 << 20, 1 << 20, 0);
  buckets.allocate(*comm::make_single(), std::nullopt);
  REQUIRE(buckets.size() == 1);
  CHECK(buckets[0].parameters == std::vector<int>{1, 0, 2});
}

TEST_CASE("what travels lies in one allocation, which the next layout takes over", "[gradient]") {
  Buckets buckets({{"a", at::zeros({40})}, {"b", at::zeros({4}, at::kDouble)}, {"c", at::zeros({40})}});
  const auto storage = [&](size_t p) { return buckets.view(p).storage().unsafeGetStorageImpl(); };
  CHECK(buckets.lay_out({}, 1, 1, 0));
  CHECK_FALSE(buckets.lay_out({2, 1, 0}, 1, 1, 0));  // the same
  buckets.allocate(*comm::make_single(), std::nullopt);
  const auto* const memory = storage(0);
  CHECK_FALSE(buckets.lay_out({}, 1, 1, 0));
  for (size_t p = 0; p < 3; ++p) {
    CHECK(storage(p) == memory);
    CHECK(reinterpret_cast<uintptr_t>(buckets.view(p).const_data_ptr()) % 64 == 0);
    buckets.view(p).fill_(static_cast<double>(p + 1));
  }
  for (size_t p = 0; p < 3; ++p) CHECK(buckets.view(p).eq(static_cast<double>(p + 1)).all().item<bool>());
  const auto version = buckets.view(0)._version();
  buckets.view(1).fill_(7);
  CHECK(buckets.view(0)._version() == version);

  CHECK(buckets.lay_out({0, 1, 2}, 1, 1, 0));
  CHECK_FALSE(buckets.view(0).defined());
  buckets.allocate(*comm::make_single(), std::nullopt);
  for (size_t p = 0; p < 3; ++p) {
    CHECK(storage(p) == memory);
    CHECK(buckets.view(p).count_nonzero().item<int64_t>() == 0);
  }
}

TEST_CASE("sums travel in the dtype of the wire, where they are fp32", "[gradient]") {
  Buckets buckets({{"a", at::zeros({4})}, {"b", at::zeros({4}, at::kDouble)}});
  buckets.lay_out({}, 1 << 20, 1 << 20, 0);
  buckets.allocate(*comm::make_single(), at::kBFloat16);
  const auto& single = buckets[static_cast<size_t>(buckets.slot(0).bucket)];
  const auto& exact = buckets[static_cast<size_t>(buckets.slot(1).bucket)];
  CHECK(single.travelling().scalar_type() == at::kBFloat16);
  CHECK(exact.travelling().is_same(exact.sums));
  single.sums.fill_(1.0 + 1.0 / 1024);
  exact.sums.fill_(1.0 + 1.0 / 1024);
  for (const auto* bucket : {&single, &exact}) {
    fill_wire(*bucket);
    empty_wire(*bucket);
  }
  CHECK(buckets.view(0).equal(at::ones({4})));
  CHECK(buckets.view(1).equal(at::ones({4}, at::kDouble) * (1.0 + 1.0 / 1024)));
}

TEST_CASE("a gradient in another order or form is arranged as its slot", "[gradient]") {
  Buckets buckets({{"a", at::zeros({2, 3})}});
  buckets.lay_out({}, 1 << 20, 1 << 20, 0);
  const auto gradient = at::arange(6, at::kFloat).view({3, 2}).t();
  CHECK_FALSE(buckets.is_arranged(0, gradient));
  const auto arranged = buckets.arranged(0, gradient);
  CHECK(buckets.is_arranged(0, arranged));
  CHECK(arranged.equal(gradient));
  CHECK_FALSE(buckets.is_arranged(0, gradient.to_sparse()));
  CHECK(buckets.arranged(0, gradient.to_sparse()).equal(gradient));
  CHECK_FALSE(buckets.is_arranged(0, arranged.to(at::kDouble)));
}

TEST_CASE("gradients keep the dtype that they come in, where kernels take it", "[gradient]") {
  Buckets buckets({{"low", at::zeros({2, 3}, at::kBFloat16)}, {"wide", at::zeros({2, 3}, at::kDouble)}});
  buckets.lay_out({}, 1 << 20, 1 << 20, 0);
  const auto gradient = (at::arange(6, at::kFloat).view({3, 2}) + 1.0 / 4096).t();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto given = gradient.to(dtype);
    CHECK(buckets.is_arranged(0, given.contiguous()));
    CHECK(buckets.arranged(0, given).scalar_type() == dtype);
    CHECK(buckets.arranged(0, given).equal(given));
    CHECK_FALSE(buckets.is_arranged(1, given.contiguous()));
    CHECK(buckets.arranged(1, given).equal(given.to(at::kDouble)));
  }
  CHECK(buckets.arranged(0, gradient.to(at::kDouble)).equal(gradient));
}

TEST_CASE("a gradient of another shape than its slot is refused by name", "[gradient]") {
  Buckets buckets({{"first", at::zeros({2, 3})}});
  buckets.lay_out({}, 1 << 20, 1 << 20, 0);
  buckets.allocate(*comm::make_single(), std::nullopt);
  for (const auto& other : {at::zeros({1, 3}), at::zeros({4, 3}), at::zeros({6}), at::zeros({1, 2, 3})}) {
    CHECK_FALSE(buckets.is_arranged(0, other));
    CHECK_THROWS_WITH(buckets.arranged(0, other), ContainsSubstring("'first'") && ContainsSubstring("[2, 3]"));
  }
}

}  // namespace muster
