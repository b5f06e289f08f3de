#include "checkpoint/saved_tree.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>

#include <cmath>
#include <limits>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::checkpoint;

namespace {

using Dict = SavedValue::Dict;
using List = SavedValue::List;

SavedValue back(const SavedValue& value) { return decode_tree(encode_tree(value), "a test"); }

SavedValue decoded(const std::string& document) { return decode_tree({document, {}}, "a test"); }

}  // namespace

TEST_CASE("values come back with their types", "[checkpoint]") {
  CHECK(back(SavedValue()).is_null());
  CHECK(back(SavedValue(uint64_t{7})).get<int64_t>() == 7);
  CHECK_THROWS_WITH(SavedValue(~uint64_t{0}), ContainsSubstring("18446744073709551615 does not fit"));
  CHECK(back(true).get<bool>());
  CHECK(back(-7).get<int64_t>() == -7);
  CHECK(back(std::numeric_limits<int64_t>::min()).get<int64_t>() == std::numeric_limits<int64_t>::min());
  CHECK(back("é\"\n").get<std::string>() == "é\"\n");
  for (const double number : {0.1, 5.0, -0.0, 1e-08, 1e300, std::numeric_limits<double>::denorm_min()}) {
    CHECK(back(number).get<double>() == number);
    CHECK(std::signbit(back(number).get<double>()) == std::signbit(number));
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CHECK(back(kInfinity).get<double>() == kInfinity);
  CHECK(back(-kInfinity).get<double>() == -kInfinity);
  CHECK(std::isnan(back(std::nan("")).get<double>()));
}

TEST_CASE("integers that only Python has are handed on", "[checkpoint]") {
  for (const std::string digits : {"9223372036854775808", "-9223372036854775809", "123456789012345678901234567890"}) {
    const auto value = decoded("[" + digits + "]");
    CHECK(value.get<List>()[0].get<SavedValue::LargeInteger>().digits == digits);
    CHECK(encode_tree(value).document == "[" + digits + "]");
    CHECK_THROWS_WITH(value.get<List>()[0].get<int64_t>(), ContainsSubstring("more than 64 bits"));
  }
  for (const std::string digits : {"", "-", "x", "01", "1.5", "- 1"}) {
    CHECK_THROWS_AS(encode_tree(Dict{{"seed", SavedValue::LargeInteger{digits}}}), InvalidArgument);
  }
  CHECK(decoded("-9223372036854775808").get<int64_t>() == std::numeric_limits<int64_t>::min());
}

TEST_CASE("nested values come back, tensors by where they are", "[checkpoint]") {
  const auto eye = at::eye(2);
  const SavedValue value = Dict{{"a", List{1, eye, SavedValue::Tuple{{0.9, 0.999}}}},
                                {"b", SavedValue::Pairs{{{int64_t{3}, "three"}, {"x", at::arange(3)}}, true}}};
  const auto tree = encode_tree(value);
  CHECK(tree.tensors.at("a/1").const_data_ptr() == eye.const_data_ptr());
  CHECK(tree.tensors.size() == 2);
  const auto read = decode_tree(tree, "a test").get<Dict>();
  const auto& list = read.at("a").get<List>();
  CHECK(list[0].get<int64_t>() == 1);
  CHECK(list[1].get<at::Tensor>().equal(eye));
  CHECK(list[2].get<SavedValue::Tuple>().items[1].get<double>() == 0.999);
  const auto& pairs = read.at("b").get<SavedValue::Pairs>();
  CHECK(pairs.is_counter);
  CHECK(std::get<int64_t>(pairs.items[0].first) == 3);
  CHECK(std::get<std::string>(pairs.items[1].first) == "x");
  CHECK(pairs.items[1].second.get<at::Tensor>().equal(at::arange(3)));
}

TEST_CASE("tensors whose places look alike are told apart", "[checkpoint]") {
  const auto read = back(Dict{{"a", Dict{{"b", at::arange(1)}}}, {"a/b", at::arange(2)}}).get<Dict>();
  CHECK(read.at("a").get<Dict>().at("b").get<at::Tensor>().numel() == 1);
  CHECK(read.at("a/b").get<at::Tensor>().numel() == 2);
}

TEST_CASE("what a file cannot hold is refused by its place", "[checkpoint]") {
  CHECK_THROWS_WITH(encode_tree(Dict{{"rows", List{at::eye(2).to_sparse()}}}), ContainsSubstring("'rows/0'"));
  CHECK_THROWS_AS(encode_tree(Dict{{"none", at::Tensor()}}), InvalidArgument);
  CHECK_THROWS_WITH(SavedValue(1.5).get<int64_t>(), ContainsSubstring("a double"));
}

TEST_CASE("a document that encode_tree does not write is refused", "[checkpoint]") {
  const auto* const document =
      GENERATE("", "{}", R"({"float":"1"})", R"({"float":1})", R"({"tensor":"x"})", R"({"tensor":1})", "[1", "[1]x",
               R"({"tuple":{}})", R"({"dict":[]})", R"({"dict":{},"tuple":[]})", R"({"items":[[1]]})",
               R"({"items":[[1,2,3]]})", R"({"items":[[1.5,2]]})", R"({"other":1})", "nul", "tru", "01", "01.5",
               "1e999", "-", "-09223372036854775808", "9223372036854775808-", "'a'", R"({"dict":{"a":1,"a":2}})");
  CAPTURE(document);
  CHECK_THROWS_AS(decoded(document), CheckpointError);
}

TEST_CASE("a document of great depth is refused and not followed", "[checkpoint]") {
  CHECK_NOTHROW(decoded(std::string(100, '[') + std::string(100, ']')));
  CHECK_THROWS_WITH(decoded(std::string(1000000, '[')), ContainsSubstring("too deep"));
  SavedValue value = 1;
  for (int depth = 1; depth < 200; ++depth) value = List{std::move(value)};
  CHECK_NOTHROW(back(value));
  value = List{std::move(value)};
  CHECK_THROWS_WITH(encode_tree(value), ContainsSubstring("too deep") && ContainsSubstring("at most 200"));
}
