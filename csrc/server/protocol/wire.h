// Messages to bytes and back. A message says its fields once, in `visit`, for both directions. Integers are
// little-endian, doubles their IEEE 754 bits, texts and lists a u32 count and what it counts. Nothing is read beyond
// the message, no count is believed before it is checked, and memory grows with what was read.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "muster/error.h"

namespace muster::server {

class WireWriter {
 public:
  template <class T>
  void number(const T& value) {
    if constexpr (std::is_same_v<T, double>) {
      put(std::bit_cast<uint64_t>(value), sizeof(uint64_t));
    } else {
      put(static_cast<uint64_t>(value), sizeof(T));
    }
  }

  void text(const std::string& value, size_t /*max*/) {
    number(static_cast<uint32_t>(value.size()));
    bytes_ += value;
  }

  /// `element(wire, item)` writes one.
  template <class T, class F>
  void list(const std::vector<T>& items, size_t /*max*/, const F& element) {
    number(static_cast<uint32_t>(items.size()));
    for (const T& item : items) element(*this, item);
  }

  template <class T>
  void numbers(const std::vector<T>& items, size_t max) {
    list(items, max, [](WireWriter& wire, const T& item) { wire.number(item); });
  }

  std::string take() { return std::move(bytes_); }

 private:
  void put(uint64_t bits, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) bytes_.push_back(static_cast<char>((bits >> (8 * i)) & 0xff));
  }

  std::string bytes_;
};

/// Every call throws CommError where the message is too short or a count is above its bound.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  void number(T& value) {
    if constexpr (std::is_same_v<T, double>) {
      value = std::bit_cast<double>(get(sizeof(uint64_t)));
    } else if constexpr (std::is_same_v<T, bool>) {
      const uint64_t bits = get(1);
      check(bits <= 1, "a flag that is neither 0 nor 1");
      value = bits == 1;
    } else {
      value = static_cast<T>(get(sizeof(T)));
    }
  }

  void text(std::string& value, size_t max) {
    const size_t size = count(max);
    check(size <= bytes_.size(), "a text that is cut short");
    value = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
  }

  template <class T, class F>
  void list(std::vector<T>& items, size_t max, const F& element) {
    const size_t size = count(max);
    items.clear();
    for (size_t i = 0; i < size; ++i) element(*this, items.emplace_back());
  }

  template <class T>
  void numbers(std::vector<T>& items, size_t max) {
    list(items, max, [](WireReader& wire, T& item) { wire.number(item); });
  }

  /// Throws unless every byte was read.
  void end() const { check(bytes_.empty(), "bytes behind its end"); }

  static void check(bool is_valid, const char* what) {
    if (is_valid) return;
    throw CommError(std::string("a message with ") + what +
                    " arrived; run one version of Muster on all workers and servers");
  }

 private:
  size_t count(size_t max) {
    uint32_t value = 0;
    number(value);
    check(value <= max, "a count above its bound");
    return value;
  }

  uint64_t get(size_t bytes) {
    check(bytes <= bytes_.size(), "fields that are cut short");
    uint64_t bits = 0;
    for (size_t i = 0; i < bytes; ++i) bits |= static_cast<uint64_t>(static_cast<unsigned char>(bytes_[i])) << (8 * i);
    bytes_.remove_prefix(bytes);
    return bits;
  }

  std::string_view bytes_;
};

template <class Message>
std::string encode(const Message& message) {
  WireWriter wire;
  Message::visit(message, wire);
  return wire.take();
}

/// Throws CommError unless `bytes` are one whole message.
template <class Message>
Message decode(std::string_view bytes) {
  Message message;
  WireReader wire(bytes);
  Message::visit(message, wire);
  wire.end();
  return message;
}

}  // namespace muster::server
