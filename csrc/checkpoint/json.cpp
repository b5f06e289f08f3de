#include "checkpoint/json.h"

#include <charconv>
#include <set>

#include "muster/error.h"

namespace muster::checkpoint {

namespace {

// Bytes of the sequence that begins the text; 0 where it is not UTF-8 (RFC 3629: shortest forms, no surrogates).
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto is_continued = [&](size_t i) { return (byte(i) & 0xc0U) == 0x80U; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xc2 || first > 0xf4 || !is_continued(1)) return 0;
  if (first < 0xe0) return 2;
  if (!is_continued(2)) return 0;
  const unsigned second = byte(1);
  if (first < 0xf0) return (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ? 0 : 3;
  if (!is_continued(3)) return 0;
  return (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f) ? 0 : 4;
}

void append_utf8(std::string& text, uint32_t code) {
  const auto append = [&](uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) return append(code);
  if (code < 0x800) {
    append(0xc0U | (code >> 6));
  } else if (code < 0x10000) {
    append(0xe0U | (code >> 12));
    append(0x80U | ((code >> 6) & 0x3fU));
  } else {
    append(0xf0U | (code >> 18));
    append(0x80U | ((code >> 12) & 0x3fU));
    append(0x80U | ((code >> 6) & 0x3fU));
  }
  append(0x80U | (code & 0x3fU));
}

constexpr std::string_view kEscapes = "\"\\/bfnrt";
constexpr std::string_view kEscaped = "\"\\/\b\f\n\r\t";

}  // namespace

void JsonReader::fail(const std::string& what) const {
  throw CheckpointError("'" + source_ + "' is damaged: " + what + " at byte " + std::to_string(next_) +
                        "; load another snapshot");
}

char JsonReader::peek() {
  while (next_ < text_.size() && std::string_view(" \t\r\n").find(text_[next_]) != std::string_view::npos) ++next_;
  return next_ < text_.size() ? text_[next_] : '\0';
}

bool JsonReader::take(char c) {
  if (peek() != c || next_ == text_.size()) return false;
  ++next_;
  return true;
}

void JsonReader::expect(char c) {
  if (!take(c)) fail(std::string("expected '") + c + "'");
}

bool JsonReader::take_word(std::string_view word) {
  peek();
  if (!text_.substr(next_).starts_with(word)) return false;
  next_ += word.size();
  return true;
}

JsonKind JsonReader::kind() {
  const char first = peek();
  if (first == '{') return JsonKind::object;
  if (first == '[') return JsonKind::array;
  if (first == '"') return JsonKind::string;
  if (first == 't' || first == 'f') return JsonKind::boolean;
  if (first == 'n') return JsonKind::null;
  if (first != '-' && (first < '0' || first > '9')) fail("expected a value");
  return JsonKind::number;
}

size_t JsonReader::position() {
  peek();
  return next_;
}

void JsonReader::read_object(const std::function<void(const std::string& key)>& member) {
  expect('{');
  if (take('}')) return;
  std::set<std::string> seen;
  do {
    const auto [key, is_new] = seen.insert(read_string());
    if (!is_new) fail("'" + *key + "' comes twice");
    expect(':');
    member(*key);
  } while (take(','));
  expect('}');
}

void JsonReader::read_array(const std::function<void()>& element) {
  expect('[');
  if (take(']')) return;
  do {
    element();
  } while (take(','));
  expect(']');
}

uint32_t JsonReader::read_hex() {
  uint32_t value = 0;
  const char* first = text_.data() + next_;
  if (text_.size() - next_ < 4 || std::from_chars(first, first + 4, value, 16).ptr != first + 4) {
    fail("expected four hexadecimal digits");
  }
  next_ += 4;
  return value;
}

std::string JsonReader::read_string() {
  expect('"');
  std::string value;
  while (next_ < text_.size() && text_[next_] != '"') {
    if (static_cast<unsigned char>(text_[next_]) < 0x20) fail("a control character in a string");
    if (text_[next_] != '\\') {
      const size_t length = sequence_length(text_.substr(next_));
      if (length == 0) fail("a string that is not UTF-8");
      value += text_.substr(next_, length);
      next_ += length;
      continue;
    }
    const char escape = ++next_ < text_.size() ? text_[next_] : '\0';
    ++next_;
    if (escape == 'u') {
      uint32_t code = read_hex();
      if (code >= 0xd800 && code < 0xdc00) {
        if (text_.substr(next_, 2) != "\\u") fail("half of a surrogate pair");
        next_ += 2;
        const uint32_t low = read_hex();
        if (low < 0xdc00 || low >= 0xe000) fail("half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
      } else if (code >= 0xdc00 && code < 0xe000) {
        fail("half of a surrogate pair");
      }
      append_utf8(value, code);
    } else {
      const size_t which = kEscapes.find(escape);
      if (escape == '\0' || which == std::string_view::npos) fail("an unknown escape");
      value += kEscaped[which];
    }
  }
  if (next_ >= text_.size()) fail("a string without an end");
  ++next_;
  return value;
}

int64_t JsonReader::read_integer() {
  const size_t first = position();
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text_.data() + first, text_.data() + text_.size(), value);
  if (error != std::errc()) fail("expected an integer of 64 bits");
  next_ = static_cast<size_t>(end - text_.data());
  if (next_ < text_.size() && std::string_view(".eE").find(text_[next_]) != std::string_view::npos) {
    fail("expected an integer");
  }
  const size_t digits = text_[first] == '-' ? first + 1 : first;
  if (text_[digits] == '0' && next_ - digits > 1) fail("a number that begins with 0");
  return value;
}

std::variant<int64_t, double, std::string> JsonReader::read_number() {
  const size_t first = position();
  const auto length = text_.substr(first).find_first_not_of("+-.eE0123456789");
  const auto digits = text_.substr(first, length);
  const auto whole = digits.substr(digits.starts_with('-') ? 1 : 0);
  if (digits.find_first_of(".eE") == std::string_view::npos) {
    constexpr size_t kFits = 18;  // digits of any int64_t
    int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool is_large = whole.size() > kFits && error == std::errc::result_out_of_range && whole[0] != '0' &&
                          end == digits.data() + digits.size();
    if (!is_large) return read_integer();
    next_ += digits.size();
    return std::string(digits);
  }
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || whole.starts_with('.') ||
      (whole.size() > 1 && whole[0] == '0' && whole[1] >= '0' && whole[1] <= '9')) {
    fail("expected a number that fits a double");
  }
  next_ += digits.size();
  return value;
}

bool JsonReader::read_bool() {
  if (take_word("true")) return true;
  if (!take_word("false")) fail("expected true or false");
  return false;
}

void JsonReader::read_null() {
  if (!take_word("null")) fail("expected null");
}

void JsonReader::read_end() {
  if (position() < text_.size()) fail("expected the end");
}

std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (size_t i = 0; i < text.size();) {
    const size_t length = sequence_length(text.substr(i));
    if (length == 0) {
      throw InvalidArgument("a name or a text of a snapshot is not UTF-8: '" + std::string(text) + "'; encode it");
    }
    const auto which = text[i] == '/' ? std::string_view::npos : kEscaped.find(text[i]);
    if (which != std::string_view::npos) {
      result += {'\\', kEscapes[which]};
    } else if (static_cast<unsigned char>(text[i]) < 0x20) {
      constexpr std::string_view kDigits = "0123456789abcdef";
      const auto byte = static_cast<unsigned char>(text[i]);
      result += "\\u00";
      result += {kDigits[byte >> 4], kDigits[byte & 15U]};
    } else {
      result += text.substr(i, length);
    }
    i += length;
  }
  return result + '"';
}

}  // namespace muster::checkpoint
