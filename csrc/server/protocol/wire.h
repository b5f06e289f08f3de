// Messages to bytes and back. A message states its fields once, as kFields, for both directions. Integers are
// little-endian, doubles their IEEE 754 bits, enumerations their number, texts and lists a u32 count and what it
// counts. Nothing is read beyond the message, no count is believed before it is checked, and memory grows with what was
// read. What has more than its bound is not written, either.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/error.h"

namespace muster::server {

/// The last enumerator of an enumeration that travels, by a specialisation beside it: what is beyond is refused.
template <class E>
struct LastOf;

/// Every call throws InvalidArgument for a text or a list above its bound, which readers would refuse.
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

  void text(const std::string& value, size_t max) {
    count(value.size(), max, "bytes of text");
    bytes_ += value;
  }

  /// `element(wire, item)` writes one.
  template <class T, class F>
  void list(const std::vector<T>& items, size_t max, const F& element) {
    count(items.size(), max, "elements of a list");
    for (const T& item : items) element(*this, item);
  }

  template <class T>
  void numbers(const std::vector<T>& items, size_t max) {
    list(items, max, [](WireWriter& wire, const T& item) { wire.number(item); });
  }

  std::string take() { return std::move(bytes_); }

 private:
  void count(size_t size, size_t max, const char* what) {
    if (size > max) {
      throw InvalidArgument("a message between workers and parameter servers would have " + std::to_string(size) + " " +
                            what + ", of at most " + std::to_string(max) + ", and would be refused");
    }
    number(static_cast<uint32_t>(size));
  }

  void put(uint64_t bits, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) bytes_.push_back(static_cast<char>((bits >> (8 * i)) & 0xff));
  }

  std::string bytes_;
};

/// Every call throws CommError where the message is too short, a count is above its bound or an enumeration has no such
/// value.
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
    } else if constexpr (std::is_enum_v<T>) {
      const uint64_t bits = get(sizeof(T));
      check(bits <= static_cast<uint64_t>(LastOf<T>::kValue), "a choice that there is not");
      value = static_cast<T>(bits);
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

/// The fields of a type that travels, in the order of their bytes. Specialised for types of other rooms.
template <class T>
struct FieldsOf {
  static constexpr auto kFields = T::kFields;
};

/// Writes or reads a value: a number, a text, a list, a type with fields or one with a `visit` of its own. `bounds`: of
/// a text's bytes; of a list's elements, then those of its elements.
template <class T, class W, class... Bounds>
void visit_value(T& value, W& wire, Bounds... bounds);

/// A member that `how(member, wire)` writes and reads.
template <class T, class M, class How>
constexpr auto field(T M::* member, How how) {
  return [member, how](auto& message, auto& wire) { how(message.*member, wire); };
}

/// A text or a list whose counts have bounds; see visit_value.
template <class T, class M, class... Bounds>
constexpr auto bounded(T M::* member, Bounds... bounds) {
  return field(member, [bounds...](auto& value, auto& wire) { visit_value(value, wire, size_t{bounds}...); });
}

/// What a type states as its kFields: numbers by their members alone, others as bounded() or field(). A text or a list
/// without its bound does not compile.
template <class... F>
constexpr auto fields(F... list) {
  [[maybe_unused]] const auto as_field = []<class G>(G one) {
    if constexpr (std::is_member_object_pointer_v<G>) {
      return bounded(one);
    } else {
      return one;
    }
  };
  return std::make_tuple(as_field(list)...);
}

namespace detail {

template <class T>
inline constexpr bool kIsVector = false;
template <class T>
inline constexpr bool kIsVector<std::vector<T>> = true;

template <class T, class W>
void visit_members(T& value, W& wire) {
  using Type = std::remove_const_t<T>;
  if constexpr (requires { Type::visit(value, wire); }) {
    Type::visit(value, wire);
  } else {
    std::apply([&](const auto&... field) { (field(value, wire), ...); }, FieldsOf<Type>::kFields);
  }
}

template <class T, class W, class... Rest>
void visit_list(T& items, W& wire, size_t max, Rest... rest) {
  wire.list(items, max, [rest...](W& inner, auto& item) { visit_value(item, inner, rest...); });
}

}  // namespace detail

template <class T, class W, class... Bounds>
void visit_value(T& value, W& wire, Bounds... bounds) {
  using Type = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Type, std::string>) {
    wire.text(value, bounds...);
  } else if constexpr (detail::kIsVector<Type>) {
    detail::visit_list(value, wire, bounds...);
  } else {
    static_assert(sizeof...(bounds) == 0, "a bound counts a text or a list");
    if constexpr (std::is_class_v<Type>) {
      detail::visit_members(value, wire);
    } else {
      wire.number(value);
    }
  }
}

template <class Message>
std::string encode(const Message& message) {
  WireWriter wire;
  visit_value(message, wire);
  return wire.take();
}

/// Throws CommError unless `bytes` are one whole message.
template <class Message>
Message decode(std::string_view bytes) {
  Message message;
  WireReader wire(bytes);
  visit_value(message, wire);
  wire.end();
  return message;
}

}  // namespace muster::server
