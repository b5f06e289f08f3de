#include "core/flat_layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>
#include <string>

#include "cpp/catch.h"
#include "muster/error.h"

namespace muster {
namespace {

using c10::ScalarType;
using Indices = std::vector<int>;
using Numbers = std::vector<int64_t>;

constexpr int64_t kUnlimited = int64_t{1} << 40;

ParameterSpec spec(std::string name, Numbers sizes, ScalarType dtype = ScalarType::Float) {
  Numbers strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return {std::move(name), std::move(sizes), std::move(strides), dtype};
}

FlatLayout layout_of(std::vector<ParameterSpec> parameters, Indices order = {}, int64_t bucket_bytes = kUnlimited,
                     int64_t first_bucket_bytes = kUnlimited) {
  return {std::move(parameters), std::move(order), bucket_bytes, first_bucket_bytes};
}

Indices bucket_members(const FlatLayout& layout, size_t bucket) { return layout.buckets()[bucket].parameters; }

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

/// What every layout must satisfy: each parameter once, aligned, inside its bucket, without overlap.
void check_invariants(const FlatLayout& layout) {
  REQUIRE(layout.slots().size() == layout.parameters().size());
  Indices seen;
  for (size_t bucket = 0; bucket < layout.buckets().size(); ++bucket) {
    const BucketSpec& spec = layout.buckets()[bucket];
    const auto element = static_cast<int64_t>(c10::elementSize(spec.dtype));
    CHECK_FALSE(spec.parameters.empty());
    CHECK(spec.numel * element % FlatLayout::kSlotAlignment == 0);
    int64_t end = 0;
    for (int index : spec.parameters) {
      const Slot& slot = layout.slots()[static_cast<size_t>(index)];
      const ParameterSpec& parameter = layout.parameters()[static_cast<size_t>(index)];
      CHECK(slot.bucket == static_cast<int>(bucket));
      CHECK(slot.offset * element % FlatLayout::kSlotAlignment == 0);
      CHECK(slot.offset >= end);
      CHECK(slot.numel ==
            std::accumulate(parameter.sizes.begin(), parameter.sizes.end(), int64_t{1}, std::multiplies<>()));
      CHECK(spec.dtype == accumulation_dtype(parameter.dtype));
      CHECK(slot.strides.size() == parameter.sizes.size());
      CHECK(is_dense(parameter.sizes, slot.strides));
      end = slot.offset + slot.numel;
      seen.push_back(index);
    }
    CHECK(spec.numel >= end);
  }
  std::sort(seen.begin(), seen.end());
  Indices all(layout.parameters().size());
  std::iota(all.begin(), all.end(), 0);
  CHECK(seen == all);
}

TEST_CASE("an empty layout has no buckets", "[flat_layout]") {
  CHECK(FlatLayout().buckets().empty());
  const FlatLayout layout = layout_of({});
  CHECK(layout.buckets().empty());
  CHECK(layout.slots().empty());
}

TEST_CASE("slots follow reverse registration order by default", "[flat_layout]") {
  const FlatLayout layout = layout_of({spec("a", {3}), spec("b", {17}), spec("c", {2, 2})});
  check_invariants(layout);
  CHECK(layout.order() == Indices{2, 1, 0});
  REQUIRE(layout.buckets().size() == 1);
  CHECK(bucket_members(layout, 0) == Indices{2, 1, 0});
  CHECK(layout.slots()[2].offset == 0);
  CHECK(layout.slots()[1].offset == 16);
  CHECK(layout.slots()[0].offset == 48);
  CHECK(layout.buckets()[0].numel == 64);
}

TEST_CASE("a given order is kept", "[flat_layout]") {
  const FlatLayout layout = layout_of({spec("a", {3}), spec("b", {3}), spec("c", {3})}, {1, 2, 0});
  check_invariants(layout);
  CHECK(bucket_members(layout, 0) == Indices{1, 2, 0});
  CHECK(layout.slots()[1].offset == 0);
}

TEST_CASE("buckets respect their limits", "[flat_layout]") {
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 10; ++i) parameters.push_back(spec("p" + std::to_string(i), {16}));  // 64 bytes each
  Indices order(10);
  std::iota(order.begin(), order.end(), 0);
  const FlatLayout layout = layout_of(parameters, order, 192, 64);
  check_invariants(layout);
  REQUIRE(layout.buckets().size() == 4);
  CHECK(bucket_members(layout, 0) == Indices{0});
  CHECK(bucket_members(layout, 1) == Indices{1, 2, 3});
  CHECK(bucket_members(layout, 3) == Indices{7, 8, 9});
}

TEST_CASE("a parameter larger than a bucket has one to itself", "[flat_layout]") {
  const FlatLayout layout = layout_of(
      {spec("small", {16}), spec("large", {1000}), spec("empty", {0}), spec("last", {16})}, {0, 1, 2, 3}, 256, 256);
  check_invariants(layout);
  REQUIRE(layout.buckets().size() == 3);
  CHECK(bucket_members(layout, 1) == Indices{1});
  CHECK(bucket_members(layout, 2) == Indices{2, 3});
}

TEST_CASE("a bucket holds one accumulation dtype and leaves when its last gradient is there", "[flat_layout]") {
  const FlatLayout layout = layout_of(
      {spec("half", {3}, ScalarType::Half), spec("double", {3}, ScalarType::Double),
       spec("bf16", {3}, ScalarType::BFloat16), spec("float", {3}), spec("float8", {3}, ScalarType::Float8_e5m2)},
      {0, 1, 2, 3, 4});
  check_invariants(layout);
  REQUIRE(layout.buckets().size() == 2);
  CHECK(layout.buckets()[0].dtype == ScalarType::Double);
  CHECK(bucket_members(layout, 0) == Indices{1});
  CHECK(layout.buckets()[0].numel == 8);
  CHECK(layout.buckets()[1].dtype == ScalarType::Float);
  CHECK(bucket_members(layout, 1) == Indices{0, 2, 3, 4});
}

TEST_CASE("empty and 0-dim parameters have slots", "[flat_layout]") {
  const FlatLayout layout = layout_of({spec("scalar", {}), spec("empty", {0, 3}), spec("last", {5})}, {0, 1, 2});
  check_invariants(layout);
  CHECK(layout.slots()[0].numel == 1);
  CHECK(layout.slots()[0].strides.empty());
  CHECK(layout.slots()[1].numel == 0);
  CHECK(layout.slots()[1].offset == 16);
  CHECK(layout.slots()[2].offset == 16);
  check_invariants(layout_of({spec("empty", {0})}));
}

TEST_CASE("dense strides are kept, others become contiguous", "[flat_layout]") {
  const ParameterSpec channels_last{"conv", {8, 3, 5, 5}, {75, 1, 15, 3}, ScalarType::Float};
  const ParameterSpec transposed{"transposed", {4, 6}, {1, 4}, ScalarType::Float};
  const ParameterSpec expanded{"expanded", {4, 6}, {0, 1}, ScalarType::Float};
  const ParameterSpec gaps{"gaps", {4, 6}, {12, 1}, ScalarType::Float};
  const FlatLayout layout = layout_of({channels_last, transposed, expanded, gaps});
  check_invariants(layout);
  CHECK(layout.slots()[0].strides == channels_last.strides);
  CHECK(layout.slots()[1].strides == transposed.strides);
  CHECK(layout.slots()[2].strides == Numbers{6, 1});
  CHECK(layout.slots()[3].strides == Numbers{6, 1});
}

TEST_CASE("is_dense", "[flat_layout]") {
  CHECK(is_dense({}, {}));
  CHECK(is_dense({2, 3}, {3, 1}));
  CHECK(is_dense({2, 3}, {1, 2}));
  CHECK(is_dense({1, 3}, {77, 1}));
  CHECK(is_dense({0, 3}, {3, 1}));
  CHECK(is_dense({2, 3, 4}, {4, 8, 1}));
  CHECK_FALSE(is_dense({2, 3}, {0, 1}));
  CHECK_FALSE(is_dense({2, 3}, {4, 1}));
  CHECK_FALSE(is_dense({2, 3}, {1, 1}));
  CHECK_FALSE(is_dense({3}, {2}));
  CHECK_FALSE(is_dense({3}, {}));
}

TEST_CASE("bad layouts are refused by name", "[flat_layout]") {
  CHECK_THAT(refusal([] { layout_of({spec("a", {1}), spec("a", {2})}); }), ContainsSubstring("'a'"));
  for (ScalarType dtype : {ScalarType::Long, ScalarType::Bool, ScalarType::ComplexFloat, ScalarType::QInt8}) {
    CHECK_THAT(refusal([&] { layout_of({spec("odd", {1}, dtype)}); }), ContainsSubstring("'odd'"));
  }
  const std::vector<ParameterSpec> two = {spec("a", {1}), spec("b", {1})};
  for (const Indices& order : {Indices{0}, Indices{0, 0}, Indices{0, 2}, Indices{-1, 0}, Indices{0, 1, 0}}) {
    CHECK_THAT(refusal([&] { layout_of(two, order); }), ContainsSubstring("order"));
  }
  CHECK_THAT(refusal([&] { layout_of(two, {}, 0); }), ContainsSubstring("bucket"));
  CHECK_THAT(refusal([] { layout_of({{"odd", {2, 2}, {1}, ScalarType::Float}}); }), ContainsSubstring("'odd'"));
}

TEST_CASE("the digest changes with everything that ranks must agree on", "[flat_layout]") {
  const std::vector<ParameterSpec> base = {spec("a", {4, 4}), spec("b", {4})};
  std::vector<FlatLayout> variants = {
      layout_of(base),
      layout_of(base, {0, 1}),
      layout_of(base, {}, 64, 64),
      layout_of({base[0]}),
      layout_of({spec("a", {4, 4}), spec("c", {4})}),
      layout_of({spec("a", {4, 4}), spec("b", {5})}),
      layout_of({spec("a", {4, 4}), spec("b", {4}, ScalarType::Half)}),
      layout_of({spec("a", {4, 4}), spec("b", {4}, ScalarType::Double)}),
      layout_of({{"a", {4, 4}, {1, 4}, ScalarType::Float}, base[1]}),
      layout_of({spec("a", {16}), spec("b", {4})}),
  };
  std::set<uint64_t> digests;
  for (const FlatLayout& variant : variants) digests.insert(variant.digest());
  CHECK(digests.size() == variants.size());
  CHECK(layout_of(base).digest() == variants[0].digest());
}

TEST_CASE("the digest is the same on every machine and in every build", "[flat_layout]") {
  CHECK(stable_hash("") == 0xcbf29ce484222325ULL);
  CHECK(stable_hash("foobar") == 0x85944171f73967e8ULL);  // from the FNV test suite
  CHECK(layout_of({spec("a", {4, 4}), spec("b", {4}, ScalarType::BFloat16)}, {1, 0}, 1024, 64).digest() ==
        0xae722b00810e7196ULL);
}

TEST_CASE("differences are described", "[flat_layout]") {
  const auto difference = [](std::vector<ParameterSpec> here, std::vector<ParameterSpec> there) {
    return FlatLayout::describe_difference(layout_of(std::move(here)), layout_of(std::move(there)));
  };
  const ParameterSpec a = spec("fc.weight", {3, 4});
  CHECK(difference({a}, {a}).empty());
  CHECK(difference({a}, {spec("fc.weight", {4, 4})}) == "parameter 'fc.weight' has shape [3, 4] here and [4, 4] there");
  CHECK(difference({a}, {spec("fc.bias", {3, 4})}) == "parameter 0 is 'fc.weight' here and 'fc.bias' there");
  CHECK(difference({a}, {spec("fc.weight", {3, 4}, ScalarType::Double)}) ==
        "parameter 'fc.weight' has dtype Float here and Double there");
  CHECK(difference({a}, {{"fc.weight", {3, 4}, {1, 3}, ScalarType::Float}}) ==
        "parameter 'fc.weight' has strides [4, 1] here and [1, 3] there");
  const ParameterSpec columns{"fc.weight", {3, 4}, {8, 1}, ScalarType::Float};  // of a wider matrix
  CHECK(difference({a}, {columns}).empty());
  CHECK(layout_of({a}).digest() == layout_of({columns}).digest());
  CHECK(difference({a}, {a, spec("x", {1})}) ==
        "there are 1 parameters here and 2 there; the first without a counterpart is 'x'");
  const std::vector<ParameterSpec> two = {a, spec("x", {1})};
  CHECK(FlatLayout::describe_difference(layout_of(two, {0, 1}), layout_of(two, {1, 0})) ==
        "gradient 0 in launch order is that of 'fc.weight' here and of 'x' there");
  CHECK(FlatLayout::describe_difference(layout_of(two), layout_of(two, {}, 64, 64)) ==
        "there are 1 buckets here and 2 there");
  const std::vector<ParameterSpec> three = {spec("a", {16}), spec("b", {16}), spec("c", {16})};
  CHECK(FlatLayout::describe_difference(layout_of(three, {}, 128, 128), layout_of(three, {}, 128, 64)) ==
        "bucket 0 has 32 elements here and 16 there");
}

}  // namespace
TEST_CASE("the gradients that come last have a bucket to themselves", "[core]") {
  // In the order of gradients: 40, 30, 20 and 10 slots of 64 bytes.
  std::vector<ParameterSpec> parameters;
  for (const int64_t slots : {10, 20, 30, 40}) {
    parameters.push_back({"p" + std::to_string(slots), {slots * 16}, {1}, at::kFloat});
  }
  const auto members = [&](int64_t last_bytes) {
    const FlatLayout layout(parameters, {}, kUnlimited, kUnlimited, last_bytes);
    check_invariants(layout);
    std::vector<Indices> all;
    for (const auto& bucket : layout.buckets()) all.push_back(bucket.parameters);
    return all;
  };
  using Buckets = std::vector<Indices>;
  CHECK(members(0) == Buckets{{3, 2, 1, 0}});
  CHECK(members(10 * 64 - 1) == Buckets{{3, 2, 1, 0}});
  CHECK(members(10 * 64) == Buckets{{3, 2, 1}, {0}});
  CHECK(members(59 * 64) == Buckets{{3, 2}, {1, 0}});
  CHECK(members(60 * 64) == Buckets{{3}, {2, 1, 0}});
  CHECK(members(1000 * 64) == Buckets{{3, 2, 1, 0}});
}

}  // namespace muster
