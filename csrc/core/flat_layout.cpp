#include "core/flat_layout.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "core/plain_text.h"
#include "muster/error.h"

namespace muster {
namespace {

int64_t element_count(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// Of a parameter's slot.
int64_t slot_bytes(const ParameterSpec& parameter) {
  constexpr int64_t kAlignment = FlatLayout::kSlotAlignment;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(accumulation_dtype(parameter.dtype)));
  return (element_count(parameter.sizes) * element_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::string text_of(const std::vector<int64_t>& numbers) {
  TextWriter out;
  out << '[';
  for (size_t i = 0; i < numbers.size(); ++i) out << (i == 0 ? "" : ", ") << numbers[i];
  out << ']';
  return out.str();
}

std::string differs(const std::string& parameter, const char* what, const std::string& here, const std::string& there) {
  return "parameter '" + parameter + "' has " + what + " " + here + " here and " + there + " there";
}

void check_parameters(const std::vector<ParameterSpec>& parameters) {
  std::unordered_set<std::string_view> names;
  for (const ParameterSpec& parameter : parameters) {
    if (!names.insert(parameter.name).second) {
      throw InvalidArgument("two parameters are named '" + parameter.name +
                            "'; give each prepared module a name of its own");
    }
    if (!c10::isFloatingType(parameter.dtype)) {
      throw InvalidArgument("parameter '" + parameter.name + "' has dtype " + c10::toString(parameter.dtype) +
                            ", whose gradients cannot be averaged; use a real floating dtype, or freeze it with "
                            "requires_grad_(False)");
    }
    if (parameter.sizes.size() != parameter.strides.size()) {
      throw InvalidArgument("parameter '" + parameter.name + "' has sizes " + text_of(parameter.sizes) +
                            " but strides " + text_of(parameter.strides) + "; pass one stride per dimension");
    }
  }
}

std::vector<int> checked_order(std::vector<int> order, size_t count) {
  if (order.empty()) {
    order.resize(count);
    std::iota(order.rbegin(), order.rend(), 0);
    return order;
  }
  std::vector<bool> seen(count, false);
  for (int index : order) {
    if (index < 0 || static_cast<size_t>(index) >= count || seen[static_cast<size_t>(index)]) {
      throw InvalidArgument("the order of gradients is no permutation of " + std::to_string(count) +
                            " parameters: index " + std::to_string(index) + " is out of range or repeated");
    }
    seen[static_cast<size_t>(index)] = true;
  }
  if (order.size() != count) {
    throw InvalidArgument("the order of gradients names " + std::to_string(order.size()) + " of " +
                          std::to_string(count) + " parameters; name each once");
  }
  return order;
}

/// Little-endian, length-prefixed text of a layout; what the digest is taken over.
class Writer {
 public:
  void number(int64_t value) {
    auto bits = static_cast<uint64_t>(value);
    for (int byte = 0; byte < 8; ++byte) bytes_.push_back(static_cast<char>((bits >> (8 * byte)) & 0xff));
  }
  void text(std::string_view value) {
    number(static_cast<int64_t>(value.size()));
    bytes_.append(value);
  }
  template <class T>
  void numbers(const std::vector<T>& values) {
    number(static_cast<int64_t>(values.size()));
    for (T value : values) number(value);
  }
  const std::string& bytes() const noexcept { return bytes_; }

 private:
  std::string bytes_;
};

uint64_t digest_of(const FlatLayout& layout) {
  Writer writer;
  writer.number(static_cast<int64_t>(layout.parameters().size()));
  for (size_t p = 0; p < layout.parameters().size(); ++p) {
    const ParameterSpec& parameter = layout.parameters()[p];
    writer.text(parameter.name);
    writer.numbers(parameter.sizes);
    writer.numbers(layout.slots()[p].strides);
    writer.text(c10::toString(parameter.dtype));
  }
  writer.numbers(layout.order());
  writer.number(static_cast<int64_t>(layout.buckets().size()));
  for (const BucketSpec& bucket : layout.buckets()) {
    writer.text(c10::toString(bucket.dtype));
    writer.number(bucket.numel);
    writer.numbers(bucket.parameters);
  }
  for (const Slot& slot : layout.slots()) writer.number(slot.offset);
  return stable_hash(writer.bytes());
}

}  // namespace

c10::ScalarType accumulation_dtype(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
}

bool is_dense(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  if (sizes.size() != strides.size()) return false;
  if (element_count(sizes) == 0) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] > 1) dims.emplace_back(strides[dim], sizes[dim]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

std::vector<int64_t> slot_strides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  if (is_dense(sizes, strides)) return strides;
  std::vector<int64_t> contiguous(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    contiguous[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return contiguous;
}

uint64_t stable_hash(std::string_view bytes, uint64_t seed) noexcept {
  constexpr uint64_t kPrime = 0x100000001b3ULL;
  uint64_t hash = seed;
  for (char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * kPrime;
  return hash;
}

// The position in the order from which on everything fits into so many bytes.
size_t FlatLayout::beginning_of_last(int64_t bytes) const {
  size_t position = order_.size();
  for (int64_t left = bytes; position > 0; --position) {
    left -= slot_bytes(parameters_[static_cast<size_t>(order_[position - 1])]);
    if (left < 0) break;
  }
  return position;
}

FlatLayout::FlatLayout(std::vector<ParameterSpec> parameters, std::vector<int> order, int64_t bucket_bytes,
                       int64_t first_bucket_bytes, int64_t last_bucket_bytes)
    : parameters_(std::move(parameters)) {
  if (bucket_bytes < 1 || first_bucket_bytes < 1) {
    throw InvalidArgument("bucket sizes must be at least 1 byte, not " + std::to_string(bucket_bytes) + " and " +
                          std::to_string(first_bucket_bytes) + " (the first)");
  }
  check_parameters(parameters_);
  order_ = checked_order(std::move(order), parameters_.size());
  slots_.resize(parameters_.size());

  struct Draft {
    BucketSpec spec;
    int64_t limit_bytes = 0;
    size_t last_position = 0;
  };
  std::vector<Draft> drafts;
  std::array<int, 2> open = {-1, -1};  // the draft being filled, for Float and for Double
  const size_t last_begins = beginning_of_last(last_bucket_bytes);

  for (size_t position = 0; position < order_.size(); ++position) {
    const int index = order_[position];
    const ParameterSpec& parameter = parameters_[static_cast<size_t>(index)];
    const c10::ScalarType dtype = accumulation_dtype(parameter.dtype);
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t numel = element_count(parameter.sizes);
    const int64_t padded = slot_bytes(parameter) / element_bytes;

    if (position == last_begins) open = {-1, -1};
    int& current = open[dtype == c10::ScalarType::Double ? 1 : 0];
    if (current >= 0) {
      const Draft& draft = drafts[static_cast<size_t>(current)];
      if ((draft.spec.numel + padded) * element_bytes > draft.limit_bytes) current = -1;
    }
    if (current < 0) {
      current = static_cast<int>(drafts.size());
      drafts.push_back({{dtype, 0, {}}, drafts.empty() ? first_bucket_bytes : bucket_bytes, 0});
    }
    Draft& draft = drafts[static_cast<size_t>(current)];
    slots_[static_cast<size_t>(index)] = {current, draft.spec.numel, numel,
                                          slot_strides(parameter.sizes, parameter.strides)};
    draft.spec.numel += padded;
    draft.spec.parameters.push_back(index);
    draft.last_position = position;
  }

  // A bucket can leave once its last gradient is there, so that is the order of launch.
  std::stable_sort(drafts.begin(), drafts.end(),
                   [](const Draft& a, const Draft& b) { return a.last_position < b.last_position; });
  for (size_t bucket = 0; bucket < drafts.size(); ++bucket) {
    for (int index : drafts[bucket].spec.parameters)
      slots_[static_cast<size_t>(index)].bucket = static_cast<int>(bucket);
    buckets_.push_back(std::move(drafts[bucket].spec));
  }
  digest_ = digest_of(*this);
}

std::string FlatLayout::describe_difference(const FlatLayout& here, const FlatLayout& there) {
  const auto& ours = here.parameters();
  const auto& theirs = there.parameters();
  const size_t common = std::min(ours.size(), theirs.size());
  for (size_t i = 0; i < common; ++i) {
    const ParameterSpec& a = ours[i];
    const ParameterSpec& b = theirs[i];
    if (a.name != b.name) {
      return "parameter " + std::to_string(i) + " is '" + a.name + "' here and '" + b.name + "' there";
    }
    if (a.sizes != b.sizes) return differs(a.name, "shape", text_of(a.sizes), text_of(b.sizes));
    if (a.dtype != b.dtype) return differs(a.name, "dtype", c10::toString(a.dtype), c10::toString(b.dtype));
    const auto& our_strides = here.slots()[i].strides;
    const auto& their_strides = there.slots()[i].strides;
    if (our_strides != their_strides) {
      return differs(a.name, "strides", text_of(our_strides), text_of(their_strides));
    }
  }
  if (ours.size() != theirs.size()) {
    const std::string& extra = (ours.size() > common ? ours : theirs)[common].name;
    return "there are " + std::to_string(ours.size()) + " parameters here and " + std::to_string(theirs.size()) +
           " there; the first without a counterpart is '" + extra + "'";
  }
  for (size_t i = 0; i < common; ++i) {
    const int a = here.order()[i];
    const int b = there.order()[i];
    if (a != b) {
      return "gradient " + std::to_string(i) + " in launch order is that of '" + ours[static_cast<size_t>(a)].name +
             "' here and of '" + theirs[static_cast<size_t>(b)].name + "' there";
    }
  }
  if (here.buckets().size() != there.buckets().size()) {
    return "there are " + std::to_string(here.buckets().size()) + " buckets here and " +
           std::to_string(there.buckets().size()) + " there";
  }
  for (size_t i = 0; i < here.buckets().size(); ++i) {
    const int64_t a = here.buckets()[i].numel;
    const int64_t b = there.buckets()[i].numel;
    if (a != b) {
      return "bucket " + std::to_string(i) + " has " + std::to_string(a) + " elements here and " + std::to_string(b) +
             " there";
    }
  }
  return {};
}

}  // namespace muster
