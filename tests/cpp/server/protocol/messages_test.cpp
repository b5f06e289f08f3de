#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "server/protocol/protocol.h"

using namespace muster;
using namespace muster::server;

namespace {

constexpr kernels::AdamGroup kAdam{0.5, 0.25, 0.75, 1.5, 2.5, true, false, true};
constexpr kernels::SgdGroup kSgd{0.5, 0.25, 0.75, 1.5, true, false};
constexpr kernels::AdagradGroup kAdagrad{0.5, 0.25, 0.75, 1.5, true};

Plan plan_of(FlatGroups groups) {
  Plan plan;
  ParameterSpec parameter;
  parameter.name = "ab";
  parameter.dtype = at::kBFloat16;
  parameter.sizes = {3, 4};
  parameter.strides = {4, 1};
  plan.parameters = {parameter};
  plan.group_of = {5};
  plan.tables = {{"t", 6, 7, RowPlacement::range, {RowInitialiser::Kind::uniform, 0.5, 8}, 9, true}};
  plan.groups = std::move(groups);
  plan.servers = 10;
  plan.workers = 11;
  plan.staleness = 12;
  plan.chunk_bytes = 13;
  plan.heartbeat_ms = 14;
  plan.timeout_ms = 15;
  plan.norm_type = 3;
  return plan;
}

// In hexadecimal digits, of a message that reads back as it was written.
template <class Message>
std::string bytes_of(const Message& message) {
  const auto bytes = encode(message);
  CHECK(encode(decode<Message>(bytes)) == bytes);
  std::string digits;
  for (const char byte : bytes) {
    char pair[3];
    std::snprintf(pair, sizeof pair, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    digits += pair;
  }
  return digits;
}

// A count of its bound is read as far as the bytes go, one above is refused for the bound.
template <class Message>
void check_bound(std::string before, uint32_t most) {
  const auto message_of = [&](uint32_t count) {
    std::string bytes = before;
    for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<char>((count >> (8 * i)) & 0xff));
    try {
      decode<Message>(bytes);
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message_of(most).find("a count above its bound") == std::string::npos);
  CHECK(message_of(most + 1).find("a count above its bound") != std::string::npos);
}

}  // namespace

TEST_CASE("every message has the bytes that it always had", "[server]") {
  CHECK(bytes_of(Hello{1, 2, 3, "t", true}) == "01000000020000000300000000000000010000007401");
  CHECK(bytes_of(Welcome{1, 2}) == "01000000000000000200000000000000");
  CHECK(bytes_of(Refusal{Refusal::Kind::fenced, "ab"}) == "04020000006162");
  CHECK(bytes_of(Done{}) == "");
  CHECK(bytes_of(Configure{1, plan_of(std::vector<kernels::AdamGroup>{kAdam}), 2, "f", Configure::Coming::joins}) ==
        "01000000010000000200000061620f02000000030000000000000004000000000000000200000004000000000000000100000000000000"
        "0100000005000000010000000100000074060000000000000007000000000000000101000000000000e03f080000000000000009000000"
        "010001000000000000000000e03f000000000000d03f000000000000e83f000000000000f83f00000000000004400100010a0000000b00"
        "00000c0000000d000000000000000e0000000f00000000000000000008400200000000000000010000006601");
  CHECK(bytes_of(Configure{1, plan_of(std::vector<kernels::SgdGroup>{kSgd}), 2, "f", Configure::Coming::joins}) ==
        "01000000010000000200000061620f02000000030000000000000004000000000000000200000004000000000000000100000000000000"
        "0100000005000000010000000100000074060000000000000007000000000000000101000000000000e03f080000000000000009000000"
        "010101000000000000000000e03f000000000000d03f000000000000e83f000000000000f83f01000a0000000b0000000c0000000d0000"
        "00000000000e0000000f00000000000000000008400200000000000000010000006601");
  CHECK(bytes_of(Configured{true, true, true, true, 1, 2, 4, {3}, {}}) ==
        "01010101010000000000000002000000000000000400000000000000010000000300000000000000"
        "00000000");
  CHECK(bytes_of(Resume{1, {}}) == "010000000000000000000000");
  CHECK(bytes_of(Busy{1, 2}) == "01000000000000000200000000000000");
  CHECK(bytes_of(Inquire{}) == "");
  CHECK(bytes_of(Standing{true, 2, {3, 4}, "f", "t"}) ==
        "01020000000000000002000000030000000400000001000000660100000074");
  CHECK(bytes_of(Write{1, Part::master}) == "0100000004");
  CHECK(bytes_of(Read{1, Part::state1, 2, true, 3}) == "01000000020200000000000000010300000000000000");
  CHECK(bytes_of(Values{1, 2}) == "010000000200000000000000");
  CHECK(bytes_of(Start{{{1, 2, 3, 4, {5}}}}) ==
        "0100000001000000020000000000000003000000000000000400000000000000010000000500000000000000");
  CHECK(bytes_of(Join{1, true, 2, {{3, 4, 5}}, {}}) ==
        "01000000000000000102000000000000000100000003000000040000000000000005000000000000000000"
        "0000");
  CHECK(bytes_of(Joined{1, {{2, 3}}}) == "010000000000000001000000020000000300000000000000");
  CHECK(bytes_of(Push{1, 2}) == "010000000000000002000000");
  CHECK(bytes_of(Pushed{1, 2, true}) == "01000000000000000200000001");
  CHECK(bytes_of(Commit{1, {0.5, 2}, "r", 3, true}) ==
        "010000000000000002000000000000000000e03f00000000000000400100000072030000000000000001");
  CHECK(bytes_of(Decision{1, {2, 3}, {4}, {0.5}, {"a", ""}, {0, 1}, {true, 5}}) ==
        "0100000000000000020000000200000003000000010000000400000001000000000000000000e03f02000000010000006100000000"
        "020000000000000001000000010500000000000000");
  CHECK(bytes_of(Sum{1, {2, 3}}) == "0100000000000000020000000200000003000000");
  CHECK(bytes_of(Partials{{{1, 2, 3, 4}, 5, 0.5}}) ==
        "010000000000000002000000000000000300000000000000040000000000000005000000000000000000e03f");
  CHECK(bytes_of(Apply{1,
                       {2},
                       {.divisor = 3, .clip = 4, .norm = 5, .unit = 6, .finite = 7, .dropped = 8, .clip_value = 9},
                       std::vector<kernels::AdagradGroup>{kAdagrad},
                       {10},
                       {{11, 12, 13}},
                       {14},
                       {true, 15}}) ==
        "01000000000000000100000002000000000000000000084000000000000010400000000000001440000000000000184007000000080000"
        "0000000000000022400201000000000000000000e03f000000000000d03f000000000000e83f000000000000f83f01010000000a000000"
        "010000000b0000000c000000000000000d00000000000000010000000e000000010f00000000000000");
  CHECK(bytes_of(Deal{1, 2, 3, 4, true, {5}}) ==
        "0100000000000000020000000300000000000000040000000000000001010000000500000000000000");
  CHECK(bytes_of(Dealt{Dealt::State::none, 1}) == "010100000000000000");
  CHECK(bytes_of(AskPasses{}) == "");
  CHECK(bytes_of(Passes{{{1, 2, 3, 4, {}}}}) ==
        "010000000100000002000000000000000300000000000000040000000000000000000000");
  CHECK(bytes_of(Applied{1, {2, 3}}) == "010000000000000002000000000000000300000000000000");
  CHECK(bytes_of(Beat{true}) == "01");
  CHECK(bytes_of(Beaten{{1, 2}, "t", 3}) == "01000000000000000200000000000000010000007403000000");
  CHECK(bytes_of(Recall{}) == "");
  CHECK(bytes_of(Recalled{{1, 2}}) == "0200000001000000000000000200000000000000");
  CHECK(bytes_of(Leave{}) == "");
  CHECK(bytes_of(PushRows{1, 2, 3, 4}) == "0100000000000000020000000300000004000000");
  CHECK(bytes_of(PullRows{1, 2, true, 3}) == "010000000200000000000000010300000000000000");
  CHECK(bytes_of(WriteRows{1}) == "01000000");
  CHECK(bytes_of(WriteRowSteps{1, 2}) == "010000000200000000000000");
  CHECK(bytes_of(FetchRows{1, 4, 2, 3}) == "010000000400000002000000000000000300000000000000");
  CHECK(bytes_of(FetchedRows{1, 2}) == "01000000000000000200000000000000");
  CHECK(bytes_of(WritePart{1, 2, "/d", {3}, {4, 5}, {6}}) ==
        "01000000000000000200000000000000020000002f64010000000300000002000000040000000500000001000000"
        "06000000");
  CHECK(bytes_of(WritesPart{{{1, 2, 0.5}}, {{3, 4}}, "no"}) ==
        "010000000100000002000000000000e03f0100000003000000000000000400000000000000020000006e6f");
}

TEST_CASE("every list and text of a message has a bound", "[server]") {
  const auto zeros = [](size_t n) { return std::string(n, '\0'); };
  check_bound<Refusal>(zeros(1), kMaxText);
  check_bound<Hello>(zeros(16), kMaxToken);
  check_bound<Configure>(zeros(4), kMaxParameters);
  check_bound<Standing>(zeros(9), kMaxWorkers);
  check_bound<Standing>(zeros(13), kMaxRecord);
  check_bound<Standing>(zeros(17), kMaxToken);
  check_bound<Configured>(zeros(28), kMaxCuts);
  check_bound<Configured>(zeros(32), 1);
  check_bound<Resume>(zeros(8), 1);
  check_bound<Join>(zeros(17), kMaxBatches);
  check_bound<Join>(zeros(21), kMaxBatches);
  check_bound<Beaten>(zeros(16), kMaxText);
  check_bound<Joined>(zeros(8), kMaxLoaders);
  check_bound<Commit>(zeros(8), kMaxNumbers);
  check_bound<Commit>(zeros(12), kMaxRecord);
  check_bound<Decision>(zeros(8), kMaxWorkers);
  check_bound<Decision>(zeros(12), kMaxWorkers);
  check_bound<Decision>(zeros(16), kMaxNumbers);
  check_bound<Decision>(zeros(20), kMaxWorkers);
  check_bound<Sum>(zeros(8), kMaxWorkers);
  check_bound<Apply>(zeros(8), kMaxWorkers);
  check_bound<Deal>(zeros(29), kMaxNumbers);
  check_bound<Recalled>("", kMaxNumbers);
  check_bound<WritePart>(zeros(16), kMaxPath);
  check_bound<WritePart>(zeros(20), kMaxParameters);
  check_bound<WritePart>(zeros(24), kMaxParameters);
  check_bound<WritePart>(zeros(28), kMaxTables);
  check_bound<WritesPart>("", kMaxNumbers);
  check_bound<WritesPart>(zeros(4), kMaxTables);
}

TEST_CASE("a norm that no partials add up to is refused", "[server]") {
  CHECK(kernels::norm_bin(std::numeric_limits<double>::max()) == kMaxNormTop);
  const auto is_taken = [](const kernels::NormSum& sum) {
    std::string bytes;
    for (const uint64_t digit : sum.digits) bytes += std::string(reinterpret_cast<const char*>(&digit), sizeof(digit));
    bytes += std::string(reinterpret_cast<const char*>(&sum.top), sizeof(sum.top));
    bytes += std::string(reinterpret_cast<const char*>(&sum.special), sizeof(sum.special));
    try {
      return encode(decode<Partials>(bytes)) == bytes;
    } catch (const CommError&) {
      return false;
    }
  };
  constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CHECK(is_taken({}));
  CHECK(is_taken({{kMaxNormDigit, kMaxNormDigit, kMaxNormDigit, kMaxNormDigit}, kMaxNormTop, kInfinity}));
  CHECK(is_taken({{}, 1, std::numeric_limits<double>::quiet_NaN()}));
  CHECK_FALSE(is_taken({{kMaxNormDigit + 1}, 1, 0}));
  CHECK_FALSE(is_taken({{0, 0, 0, kAll}, 1, 0}));
  CHECK_FALSE(is_taken({{}, kMaxNormTop + 1, 0}));
  CHECK_FALSE(is_taken({{}, 0, 0}));
  CHECK_FALSE(is_taken({{}, -1, 0}));
  CHECK_FALSE(is_taken({{}, 1, -1}));
  CHECK_FALSE(is_taken({{}, 1, -kInfinity}));
}
