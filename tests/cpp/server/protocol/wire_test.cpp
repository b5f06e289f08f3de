#include "server/protocol/wire.h"

#include "cpp/catch.h"
#include "server/protocol/protocol.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;

TEST_CASE("messages read back as they were written", "[server]") {
  Configure configure{
      2,
      testing::small_plan(3, 4, std::vector<kernels::AdamGroup>{{0.1, 0.9, 0.99, 1e-8, 0.5, true, false, true}, {}})};
  configure.plan.tables = {
      {"rows", 1'000'000'000'000, 32, RowPlacement::range, {RowInitialiser::Kind::uniform, 0.5, 7}, 1}};
  configure.job = 5;
  configure.facts = "facts";
  const auto read = decode<Configure>(encode(configure));
  CHECK(read.server == 2);
  CHECK(read.job == 5);
  CHECK(read.facts == "facts");
  CHECK((read.plan.parameters == configure.plan.parameters));
  CHECK(read.plan.group_of == configure.plan.group_of);
  CHECK((read.plan.tables == configure.plan.tables));
  CHECK((read.plan.groups == configure.plan.groups));
  CHECK(read.plan.chunk_bytes == configure.plan.chunk_bytes);
  CHECK(read.plan.describe_difference(configure.plan).empty());

  Apply apply;
  apply.step = 7;
  apply.members = {0, 3};
  apply.scalars.norm = 0.5;
  apply.scalars.finite = 0;
  apply.groups = std::vector<kernels::SgdGroup>{{1, 0.9, 0, 0.1, true, false}};
  apply.unused = {5};
  apply.unused_tables = {2};
  const auto again = decode<Apply>(encode(apply));
  CHECK(again.step == 7);
  CHECK(again.members == apply.members);
  CHECK((again.scalars == apply.scalars));
  CHECK((again.groups == apply.groups));
  CHECK(again.unused == apply.unused);
  CHECK(again.unused_tables == apply.unused_tables);
}

TEST_CASE("the bytes are those of the document", "[server]") {
  CHECK(encode(Push{0x0102, 3}) == std::string("\x02\x01\0\0\0\0\0\0\x03\0\0\0", 12));
  CHECK(encode(Refusal{Refusal::Kind::timeout, "ab"}) == std::string("\x03\x02\0\0\0ab", 7));
  CHECK(encode(PushRows{1, 2, 3, 4}) == std::string("\x01\0\0\0\0\0\0\0\x02\0\0\0\x03\0\0\0\x04\0\0\0", 20));
  CHECK(encode(PullRows{1, 2, true, 3}) == std::string("\x01\0\0\0\x02\0\0\0\0\0\0\0\x01\x03\0\0\0\0\0\0\0", 21));
  CHECK(encode(WriteRowSteps{1, 2}) == std::string("\x01\0\0\0\x02\0\0\0\0\0\0\0", 12));
  CHECK(encode(FetchRows{1, 4, 2, 3}) == std::string("\x01\0\0\0\x04\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0", 24));
  CHECK(encode(FetchedRows{1, 2}) == std::string("\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0", 16));
  CHECK(encode(Inquire{}).empty());
  CHECK(encode(Standing{true, 2, {3}, "ab", "t"}) == std::string("\x01\x02\0\0\0\0\0\0\0\x01\0\0\0\x03\0\0\0\x02\0\0\0"
                                                                 "ab\x01\0\0\0t",
                                                                 28));
  CHECK(encode(Joined{1, {{2, 3}}}) == std::string("\x01\0\0\0\0\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0\0\0\0\0", 24));
  CHECK(encode(Sum{1, {9}}) == std::string("\x01\0\0\0\0\0\0\0\x01\0\0\0\x09\0\0\0", 16));
}

TEST_CASE("no message passes that is cut, too long, or counts too much", "[server]") {
  const std::string whole = encode(Decision{4, {1, 2}, {1}, {0.5}, {"a", ""}, {0, 1}});
  for (size_t n = 0; n < whole.size(); ++n) CHECK_THROWS_AS(decode<Decision>(whole.substr(0, n)), CommError);
  CHECK_THROWS_AS(decode<Decision>(whole + "x"), CommError);
  CHECK_THROWS_AS(decode<Sum>(std::string("\x01\0\0\0\0\0\0\0\xff\xff\xff\xff", 12)), CommError);
  CHECK_THROWS_AS(decode<Beat>(std::string("\x02", 1)), CommError);
}
