#include "checkpoint/json.h"

#include <limits>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::checkpoint;

namespace {

std::string decoded_string(const std::string& text) {
  JsonReader json(text, "a test");
  auto value = json.read_string();
  json.read_end();
  return value;
}

int64_t integer(const std::string& text) {
  JsonReader json(text, "a test");
  const auto value = json.read_integer();
  json.read_end();
  return value;
}

}  // namespace

TEST_CASE("strings come back as they were written", "[checkpoint]") {
  std::string all;
  for (int c = 0; c < 0x80; ++c) all += static_cast<char>(c);
  for (const std::string& text : {std::string(), all, std::string("é ‐ \U0001F600 \uFFFF")}) {
    CHECK(decoded_string(json_string(text)) == text);
  }
  CHECK(decoded_string(R"( "\u00e9\ud83d\ude00\/\b" )") == "é\U0001F600/\b");
  CHECK_THROWS_AS(json_string("\xff"), InvalidArgument);
}

TEST_CASE("a string that is none is refused", "[checkpoint]") {
  for (const std::string& text :
       std::vector<std::string>{"", "\"", "x", "\"a", "\"\\", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\ud800\"",
                                "\"\\ud800\\u0041\"", "\"\\udc00\"", "\"\n\"", "\"\xff\"", "\"\xc0\x80\"",
                                "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xe2\x82", "\"a\" b"}) {
    INFO(text);
    CHECK_THROWS_AS(decoded_string(text), CheckpointError);
  }
  CHECK_THROWS_AS(decoded_string(std::string("\"\\\0\"", 4)), CheckpointError);
}

TEST_CASE("integers are those of 64 bits", "[checkpoint]") {
  for (const int64_t value :
       {int64_t{0}, int64_t{-7}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()}) {
    CHECK(integer(std::to_string(value)) == value);
  }
  for (const char* text : {"", "-", "+1", "01", "-01", "1.0", "1e3", "9223372036854775808", "NaN", "\"1\"", "1 2"}) {
    INFO(text);
    CHECK_THROWS_AS(integer(text), CheckpointError);
  }
}

TEST_CASE("objects and arrays are read in their order", "[checkpoint]") {
  const std::string text = " { \"b\" : [ 1 , 2 ] , \"a\" : [] , \"c\" : {} } ";
  JsonReader json(text, "a test");
  std::vector<std::string> seen;
  json.read_object([&](const std::string& key) {
    seen.push_back(key);
    if (key == "c") return json.read_object([](const std::string&) {});
    json.read_array([&] { seen.push_back(std::to_string(json.read_integer())); });
  });
  json.read_end();
  CHECK(seen == std::vector<std::string>{"b", "1", "2", "a", "c"});

  for (const char* wrong : {"{\"a\":1,}", "{\"a\" 1}", "{\"a\":1", "{,}", "{\"a\":1,\"a\":1}", "[1]", "{a:1}"}) {
    INFO(wrong);
    JsonReader reader(wrong, "a test");
    CHECK_THROWS_AS(reader.read_object([&](const std::string&) { reader.read_integer(); }), CheckpointError);
  }
  for (const char* wrong : {"[1,]", "[1 2]", "[1", "[,]", "{}"}) {
    INFO(wrong);
    JsonReader reader(wrong, "a test");
    CHECK_THROWS_AS(reader.read_array([&] { reader.read_integer(); }), CheckpointError);
  }
}

TEST_CASE("an error names the source and the place", "[checkpoint]") {
  JsonReader json("[1, x]", "some/file");
  CHECK_THROWS_WITH(json.read_array([&] { json.read_integer(); }),
                    ContainsSubstring("'some/file'") && ContainsSubstring("byte 4"));
}
