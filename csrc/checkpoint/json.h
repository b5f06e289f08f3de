// JSON (RFC 8259), read in the order in which it comes. What is read decides how deep: nothing that a file says makes
// the reader recurse or allocate more than the text's size at once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>

namespace muster::checkpoint {

/// Of a value, by its first character.
enum class JsonKind : uint8_t { object, array, string, number, boolean, null };

/// Reads one value after another. Every call throws CheckpointError, naming the source and the position, where the text
/// holds something else. A view of the text. Owned by one thread.
class JsonReader {
 public:
  /// `source`, a path, is for messages.
  JsonReader(std::string_view text, std::string source) : text_(text), source_(std::move(source)) {}

  /// Calls `member(key)` for each member; that reads the value. A key that comes twice is an error.
  void read_object(const std::function<void(const std::string& key)>& member);
  /// Calls `element()` for each element; that reads it.
  void read_array(const std::function<void()>& element);
  /// Decoded to UTF-8, which the text must be.
  std::string read_string();
  /// A number without fraction and exponent that fits.
  int64_t read_integer();
  /// An integer where the text has neither fraction nor exponent, else a double. The digits of an integer, with its
  /// sign, that does not fit into 64 bits.
  std::variant<int64_t, double, std::string> read_number();
  bool read_bool();
  void read_null();
  /// Nothing but white space may follow.
  void read_end();

  /// Of the next value.
  JsonKind kind();
  size_t position();
  [[noreturn]] void fail(const std::string& what) const;

 private:
  char peek();
  bool take(char c);
  void expect(char c);
  bool take_word(std::string_view word);
  uint32_t read_hex();

  std::string_view text_;
  std::string source_;
  size_t next_ = 0;
};

/// `text` as a JSON string, quotes included. Throws InvalidArgument if it is not UTF-8.
std::string json_string(std::string_view text);

}  // namespace muster::checkpoint
