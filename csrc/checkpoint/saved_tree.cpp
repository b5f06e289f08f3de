#include "checkpoint/saved_tree.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>

#include "checkpoint/json.h"
#include "muster/error.h"

namespace muster {

std::string SavedValue::kind() const {
  return visit([](const auto& value) -> std::string {
    using T = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<T, std::monostate>) return "nothing";
    if constexpr (std::is_same_v<T, bool>) return "a bool";
    if constexpr (std::is_same_v<T, int64_t>) return "an integer";
    if constexpr (std::is_same_v<T, double>) return "a double";
    if constexpr (std::is_same_v<T, std::string>) return "a text";
    if constexpr (std::is_same_v<T, at::Tensor>) return "a tensor";
    if constexpr (std::is_same_v<T, List>) return "a list";
    if constexpr (std::is_same_v<T, Dict>) return "a dict";
    if constexpr (std::is_same_v<T, LargeInteger>) return "an integer of more than 64 bits";
    if constexpr (std::is_same_v<T, Tuple>) return "a tuple";
    return "a dict by integers";
  });
}

}  // namespace muster

namespace muster::checkpoint {

namespace {

constexpr int kMaxDepth = 200;

// The shortest decimal that reads back as the value, and not as an integer.
std::string fraction_of(double value) {
  char buffer[32];
  std::string text(buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

// Counts how deep values lie in one another while it lives; `refuse` throws where that is too deep.
class Deeper {
 public:
  template <class Refuse>
  Deeper(int& depth, const Refuse& refuse) : depth_(depth) {
    if (depth >= kMaxDepth) refuse();
    ++depth_;
  }
  ~Deeper() { --depth_; }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;

 private:
  int& depth_;
};

class Encoder {
 public:
  explicit Encoder(bool in_place) : in_place_(in_place) {}

  std::string write(const SavedValue& value, const std::string& path) {
    const Deeper deeper(depth_, [&] {
      throw InvalidArgument("'" + path.substr(0, 80) + "...' lies too deep for a checkpoint; save at most " +
                            std::to_string(kMaxDepth) + " values in one another");
    });
    return value.visit([&](const auto& held) { return text_of(held, path); });
  }

  NamedTensors take_tensors() { return std::move(tensors_); }

 private:
  static std::string text_of(std::monostate, const std::string&) { return "null"; }
  static std::string text_of(bool value, const std::string&) { return value ? "true" : "false"; }
  static std::string text_of(int64_t value, const std::string&) { return std::to_string(value); }
  static std::string text_of(double value, const std::string&) {
    if (std::isfinite(value)) return fraction_of(value);
    return std::string(R"({"float":")") + (std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf") + "\"}";
  }
  static std::string text_of(const std::string& value, const std::string&) { return json_string(value); }
  static std::string text_of(const SavedValue::LargeInteger& value, const std::string& path) {
    constexpr size_t kMostDigits = 3010;  // of 10,000 bits: what Python saves and reads
    std::string_view digits = value.digits;
    if (digits.starts_with('-')) digits.remove_prefix(1);
    const bool is_one = !digits.empty() && digits.size() <= kMostDigits && digits[0] != '0' &&
                        digits.find_first_not_of("0123456789") == std::string_view::npos;
    if (is_one) return value.digits;
    throw InvalidArgument("'" + path + "' is '" + value.digits.substr(0, 80) + "', which is no integer of up to " +
                          std::to_string(kMostDigits) + " digits");
  }

  std::string text_of(const at::Tensor& tensor, const std::string& path) {
    std::string name = path;
    while (tensors_.contains(name)) name += '\'';  // a key with a slash
    if (tensor.defined() && tensor.layout() != at::kStrided) {
      throw InvalidArgument("'" + path + "' is a sparse tensor, which a checkpoint does not hold; make it dense");
    }
    if (in_place_ && tensor.defined()) {
      tensors_.emplace(name, tensor.detach());
    } else {
      const auto stored = tensor.defined() ? tensor.detach().cpu() : tensor;
      check_storable(name, stored);
      tensors_.emplace(name, stored);
    }
    return "{\"tensor\":" + json_string(name) + '}';
  }

  std::string text_of(const SavedValue::List& list, const std::string& path) {
    std::string text = "[";
    for (size_t i = 0; i < list.size(); ++i) {
      if (i > 0) text += ',';
      text += write(list[i], path + '/' + std::to_string(i));
    }
    return text + ']';
  }

  std::string text_of(const SavedValue::Tuple& tuple, const std::string& path) {
    return "{\"tuple\":" + text_of(tuple.items, path) + '}';
  }

  std::string text_of(const SavedValue::Dict& dict, const std::string& path) {
    std::string text = "{\"dict\":{";
    for (const auto& [key, value] : dict) {
      if (text.back() != '{') text += ',';
      text += json_string(key) + ':' + write(value, inner(path, key));
    }
    return text + "}}";
  }

  std::string text_of(const SavedValue::Pairs& pairs, const std::string& path) {
    std::string text = pairs.is_counter ? "{\"counter\":[" : "{\"items\":[";
    for (const auto& [key, value] : pairs.items) {
      if (text.back() != '[') text += ',';
      const auto* const number = std::get_if<int64_t>(&key);
      const auto name = number != nullptr ? std::to_string(*number) : std::get<std::string>(key);
      text += '[' + (number != nullptr ? name : json_string(name)) + ',' + write(value, inner(path, name)) + ']';
    }
    return text + "]}";
  }

  static std::string inner(const std::string& path, const std::string& key) {
    return path.empty() ? key : path + '/' + key;
  }

  const bool in_place_;
  NamedTensors tensors_;
  int depth_ = 0;
};

class Decoder {
 public:
  /// Without `tensors` there is nothing in their place.
  Decoder(const std::string& document, const NamedTensors* tensors, const std::string& source)
      : json_(document, source), tensors_(tensors) {}

  SavedValue read_all() {
    auto value = read();
    json_.read_end();
    return value;
  }

 private:
  SavedValue read() {
    const Deeper deeper(depth_, [&] { json_.fail("values that lie too deep in one another"); });
    switch (json_.kind()) {
      case JsonKind::object:
        return read_object();
      case JsonKind::array:
        return read_list();
      case JsonKind::string:
        return json_.read_string();
      case JsonKind::boolean:
        return json_.read_bool();
      case JsonKind::null:
        json_.read_null();
        return {};
      case JsonKind::number:
        break;
    }
    auto number = json_.read_number();
    if (const auto* integer = std::get_if<int64_t>(&number)) return *integer;
    if (auto* digits = std::get_if<std::string>(&number)) return SavedValue::LargeInteger{std::move(*digits)};
    return std::get<double>(number);
  }

  SavedValue::List read_list() {
    SavedValue::List list;
    json_.read_array([&] { list.push_back(read()); });
    return list;
  }

  SavedValue read_object() {
    std::optional<SavedValue> value;
    json_.read_object([&](const std::string& kind) {
      if (value) json_.fail("a value of more than one kind");
      value = read_kind(kind);
    });
    if (!value) json_.fail("a value of no kind");
    return std::move(*value);
  }

  SavedValue read_kind(const std::string& kind) {
    if (kind == "tensor") {
      const auto name = json_.read_string();
      if (tensors_ == nullptr) return {};
      const auto found = tensors_->find(name);
      if (found == tensors_->end()) json_.fail("a tensor that is in no file");
      return found->second;
    }
    if (kind == "float") return read_special();
    if (kind == "tuple") return SavedValue::Tuple{read_list()};
    if (kind == "dict") {
      SavedValue::Dict dict;
      json_.read_object([&](const std::string& key) { dict.emplace(key, read()); });
      return dict;
    }
    if (kind != "items" && kind != "counter") json_.fail("a value of the unknown kind '" + kind + "'");
    return read_pairs(kind == "counter");
  }

  SavedValue read_special() {
    const auto text = json_.read_string();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return kInfinity;
    if (text != "-inf") json_.fail("what is no number");
    return -kInfinity;
  }

  SavedValue read_pairs(bool is_counter) {
    SavedValue::Pairs pairs;
    pairs.is_counter = is_counter;
    json_.read_array([&] {
      int seen = 0;
      auto& [key, value] = pairs.items.emplace_back();
      json_.read_array([&] {
        if (++seen == 2) {
          value = read();
        } else if (seen == 1 && json_.kind() == JsonKind::string) {
          key = json_.read_string();
        } else {
          key = json_.read_integer();
        }
      });
      if (seen != 2) json_.fail("a pair that is none");
    });
    return pairs;
  }

  JsonReader json_;
  const NamedTensors* tensors_;
  int depth_ = 0;
};

}  // namespace

namespace {

SavedTree encoded_by(Encoder encoder, const SavedValue& value) {
  SavedTree tree;
  tree.document = encoder.write(value, "");
  tree.tensors = encoder.take_tensors();
  return tree;
}

}  // namespace

SavedTree encode_tree(const SavedValue& value) { return encoded_by(Encoder(/*in_place=*/false), value); }

SavedTree encode_tree_in_place(const SavedValue& value) { return encoded_by(Encoder(/*in_place=*/true), value); }

void copy_what_is_kept(NamedTensors& tensors) {
  constexpr std::string_view kLarge[] = {"modules/", "optimizers/", "tables/"};
  for (auto& [name, tensor] : tensors) {
    const auto is_in = [&name = name](std::string_view part) { return name.starts_with(part); };
    if (std::ranges::none_of(kLarge, is_in)) tensor = tensor.clone();
  }
}

SavedValue decode_tree(const SavedTree& tree, const std::string& source) {
  return Decoder(tree.document, &tree.tensors, source).read_all();
}

SavedValue decode_outline(const std::string& document, const std::string& source) {
  return Decoder(document, nullptr, source).read_all();
}

}  // namespace muster::checkpoint
