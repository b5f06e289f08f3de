#include "core/lines.h"

#include "cpp/catch.h"

using namespace muster;

TEST_CASE("the first line is found in which texts differ", "[core]") {
  CHECK(lines_of("a\n\nb") == std::vector<std::string>{"a", "", "b"});
  CHECK_FALSE(first_difference("a\nb\n", "a\nb"));
  const auto other = first_difference("a\nb\nc\n", "a\nd\nc\n");
  REQUIRE(other);
  CHECK(other->number == 1);
  CHECK(other->first == "b");
  CHECK(other->second == "d");
  const auto missing = first_difference("a\n", "a\nb\n");
  REQUIRE(missing);
  CHECK(missing->first == "nothing");
  CHECK(missing->second == "b");
}
