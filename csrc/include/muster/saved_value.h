// Values of the program's own that Strategy::save keeps beside what is prepared.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "muster/error.h"

namespace muster {

/// Nothing, a bool, an integer, a double, a text (UTF-8), a tensor, or a list or dict of such values:
///
///     SavedState state{{"epoch", 3}, {"best", 0.92}, {"average", SavedValue::Dict{{"weight", tensor}}}};
///     state.at("epoch").get<int64_t>();
///
/// A value; copies share tensors.
class SavedValue {
 public:
  /// Values in order.
  using List = std::vector<SavedValue>;
  /// Values by name.
  using Dict = std::map<std::string, SavedValue>;
  /// A Python program's integer that does not fit into an int64_t; C++ programs hand it on.
  struct LargeInteger {
    std::string digits;  ///< decimal, with its sign where that is negative; at most 3010, or save() refuses them
  };
  /// A Python program's tuple; C++ programs hand it on.
  struct Tuple {
    List items;  ///< what it holds
  };
  /// A Python program's dict with integers among its keys; C++ programs hand it on.
  struct Pairs {
    std::vector<std::pair<std::variant<int64_t, std::string>, SavedValue>> items;  ///< in the dict's order
    bool is_counter = false;  ///< a collections.Counter; else a dict with integers among its keys
  };

  SavedValue() = default;
  /// @name Conversions
  /// @{

  /// Implicit from anything that it may hold.
  SavedValue(bool value) : value_(value) {}  // NOLINT(google-explicit-constructor): so the next ones
  /// Throws InvalidArgument for an unsigned integer above the largest int64_t: save it as text.
  template <std::integral T>
    requires(!std::same_as<T, bool>)
  SavedValue(T value) : value_(static_cast<int64_t>(value)) {  // NOLINT
    if (std::unsigned_integral<T> && get<int64_t>() < 0) {
      throw InvalidArgument("a saved integer has 64 bits with a sign, and " + std::to_string(value) +
                            " does not fit; save std::to_string() of it");
    }
  }
  template <std::floating_point T>
  SavedValue(T value) : value_(static_cast<double>(value)) {}    // NOLINT
  SavedValue(const char* value) : value_(std::string(value)) {}  // NOLINT
  SavedValue(std::string value) : value_(std::move(value)) {}    // NOLINT
  SavedValue(at::Tensor value) : value_(std::move(value)) {}     // NOLINT
  SavedValue(LargeInteger value) : value_(std::move(value)) {}   // NOLINT
  SavedValue(List value) : value_(std::move(value)) {}           // NOLINT
  SavedValue(Dict value) : value_(std::move(value)) {}           // NOLINT
  SavedValue(Tuple value) : value_(std::move(value)) {}          // NOLINT
  SavedValue(Pairs value) : value_(std::move(value)) {}          // NOLINT
  /// @}

  /// Whether it holds nothing.
  bool is_null() const noexcept { return holds<std::monostate>(); }
  /// T: bool, int64_t, double, std::string, at::Tensor, List, Dict, LargeInteger, Tuple or Pairs.
  template <class T>
  bool holds() const noexcept {
    return std::holds_alternative<T>(value_);
  }
  /// Throws InvalidArgument where it holds another type.
  template <class T>
  const T& get() const {
    if (const T* value = std::get_if<T>(&value_)) return *value;
    throw InvalidArgument("a saved value is " + kind() + " and was read as something else; ask holds<T>() first");
  }

  /// Calls `visitor` with what it holds; with std::monostate where that is nothing.
  template <class Visitor>
  decltype(auto) visit(Visitor&& visitor) const {
    return std::visit(std::forward<Visitor>(visitor), value_);
  }

  /// For messages: "a tensor".
  std::string kind() const;

 private:
  std::variant<std::monostate, bool, int64_t, double, std::string, at::Tensor, List, Dict, LargeInteger, Tuple, Pairs>
      value_;
};

/// By name.
using SavedState = SavedValue::Dict;

/// A value.
struct SaveOptions {
  std::optional<int> keep = {};  ///< how many of the newest checkpoints stay in the folder, at least 1; empty: all
};

}  // namespace muster
